// Low-latency dispatch, sending side: a token goes once to each rank that holds one of its slots, optionally cast to
// fp8.
#pragma once
#include "cast.cuh"
#include "low_latency_dispatch.cuh"

namespace eprt::low_latency {

// ---- routing --------------------------------------------------------------------------------------------------------
//
// Every thread block reads the routing of the whole batch, so it numbers its tokens without communication.

struct Routing {   // in shared memory
  int16_t* entry;  // [T * K]: rank << 10 | local slot (at most 32 ranks of 1024 slots), or -1; padded to whole vectors
  uint32_t* to_rank;  // [R][words]: bit t is set if a slot of token t lies on that rank
  int words;          // 32-bit words per rank in to_rank

  EPRT_DEVICE Routing(const DispatchParams& p, uint8_t* smem)
      : entry(reinterpret_cast<int16_t*>(smem)),
        to_rank(reinterpret_cast<uint32_t*>(smem + ceil_div(p.num_tokens * kTopk, 8) * 16)),
        words(ceil_div(p.num_tokens, kWarp)) {}
  EPRT_DEVICE uint8_t* end() const { return reinterpret_cast<uint8_t*>(to_rank + kRanks * words); }
};

constexpr int kSlotLoads = 4;  // loads that a thread has in flight

__device__ __noinline__ void report_bad_slot(const Deadline& deadline, int64_t slot, int i) {
  report(deadline.failure, kBadSlot, uint32_t(slot >> 32), uint32_t(slot), i);
}

template <class Index>
EPRT_DEVICE void read_entries(const DispatchParams& p, const Index* topk_slot, const Routing& routing) {
  const int num_slots = p.context.num_slots, num_entries = p.num_tokens * kTopk, padded = ceil_div(num_entries, 8) * 8;
  for (int first = threadIdx.x; first < padded; first += kSlotLoads * kThreads) {
    Index slots[kSlotLoads];
    // Past the end, load the last entry again: with a branch, each load would be awaited before the next is issued.
#pragma unroll
    for (int j = 0; j < kSlotLoads; ++j) slots[j] = topk_slot[min(first + j * kThreads, num_entries - 1)];
#pragma unroll
    for (int j = 0; j < kSlotLoads; ++j) {
      const int i = first + j * kThreads;
      if (i >= padded) continue;
      const bool names_one = i < num_entries && slots[j] >= 0 && slots[j] < num_slots * kRanks;
      routing.entry[i] = names_one ? int(slots[j]) / num_slots << 10 | int(slots[j]) % num_slots : -1;
      if (!names_one && slots[j] != -1 && i < num_entries && blockIdx.x == 0)
        report_bad_slot(p.context.deadline, slots[j], i);
    }
  }
}

EPRT_DEVICE void read_entries(const DispatchParams& p, const Routing& routing) {
  if (p.slot_bytes == 8)
    read_entries(p, static_cast<const int64_t*>(p.topk_slot), routing);
  else
    read_entries(p, static_cast<const int32_t*>(p.topk_slot), routing);
}

EPRT_DEVICE void mark_ranks(const DispatchParams& p, const Routing& routing, int lane) {
  for (int t = threadIdx.x; t < routing.words * kWarp; t += kThreads) {
    uint32_t ranks = 0;
    for (int k = 0; k < kTopk && t < p.num_tokens; ++k) {
      const int entry = routing.entry[t * kTopk + k];
      if (entry >= 0) ranks |= 1u << (entry >> 10);
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const uint32_t tokens = __ballot_sync(kAllLanes, (ranks >> r) & 1);
      if (lane == r) routing.to_rank[r * routing.words + t / kWarp] = tokens;
    }
  }
}

// How many tokens before `token` go to `rank`: the token's position in that rank's list.
EPRT_DEVICE int position_of(const Routing& routing, int token, int rank) {
  const uint32_t* to_rank = routing.to_rank + rank * routing.words;
  int n = __popc(to_rank[token / kWarp] & ((1u << (token % kWarp)) - 1));
#pragma unroll 1
  for (int i = 0; i < token / kWarp; ++i) n += __popc(to_rank[i]);
  return n;
}

// How many of the first `end` entries equal `entry`. Called by one warp; all lanes get the result.
EPRT_DEVICE int count_entries(const Routing& routing, int entry, int end, int lane) {
  const int whole = end / 8;
  int n = 0;
#pragma unroll 2
  for (int v = lane; v < whole; v += kWarp) {
    const Vec16 eight = reinterpret_cast<const Vec16*>(routing.entry)[v];
#pragma unroll
    for (int j = 0; j < 4; ++j) n += __popc(__vcmpeq2(eight.w[j], entry * 0x10001u));
  }
  n /= 16;  // each equal entry set all 16 of its bits
  if (lane < end % 8) n += routing.entry[whole * 8 + lane] == entry;
  return __reduce_add_sync(kAllLanes, n);
}

struct Destinations {    // of one token, in shared memory
  int count;             // ranks that the token goes to; the first `count` elements of the next three arrays are used
  int rank[kRanks];      // the ranks
  int position[kRanks];  // the token's position in the rank's list
  int row[kRanks];       // the combine row that the rank fills
  int index[kTopk];      // of each entry: earlier entries of the same slot
};

// Which of the token's combine rows `rank` fills: row `rank`, or that of the first k whose slot lies on `rank`.
EPRT_DEVICE int combine_row(const Routing& routing, int token, int rank) {
  if (kRowIsRank) return rank;
  int row = 0;
  for (int k = kTopk - 1; k >= 0; --k)
    if (routing.entry[token * kTopk + k] >= 0 && routing.entry[token * kTopk + k] >> 10 == rank) row = k;
  return row;
}

// Fills in the destinations of a token, masked ranks left out. Called by all warps of a group: each counts some
// entries, the last one also finds the ranks.
EPRT_DEVICE void find_destinations(const Routing& routing, int token, uint32_t masked, Destinations* d, int group_warp,
                                   int lane) {
  for (int k = group_warp; k < kTopk; k += kGroupWarps) {
    const int i = token * kTopk + k;
    const int entry = routing.entry[i];
    const int index = entry < 0 ? 0 : count_entries(routing, entry, i, lane);
    if (lane == 0) d->index[k] = index;
  }
  if (group_warp != kGroupWarps - 1) return;
  const bool mine = lane < kRanks && (routing.to_rank[lane * routing.words + token / kWarp] >> (token % kWarp)) & 1;
  const uint32_t ranks = __ballot_sync(kAllLanes, mine), before = (1u << lane) - 1;
  if (mine && !((masked >> lane) & 1)) {
    const int n = __popc(ranks & ~masked & before);
    d->rank[n] = lane;
    d->position[n] = position_of(routing, token, lane);
    d->row[n] = combine_row(routing, token, lane);
  }
  if (lane == 0) d->count = __popc(ranks & ~masked);
}

// ---- send -----------------------------------------------------------------------------------------------------------

// How many tokens go to a rank. Called by one warp; all lanes get the result.
EPRT_DEVICE int count_tokens(const DispatchParams& p, const Routing& routing, int rank, int lane) {
  int n = 0;
#pragma unroll 1
  for (int token = lane; token < p.num_tokens; token += kWarp) {
    bool goes = false;
#pragma unroll
    for (int k = 0; k < kTopk; ++k) goes |= routing.entry[token * kTopk + k] >> 10 == rank;  // -1 matches no rank
    n += goes;
  }
  return __reduce_add_sync(kAllLanes, n);
}

// Tells each rank how many rows and tokens this rank sends it, in words that hold the epoch, which need no fence and no
// flag. Called by the placing threads, a warp per word, while the others send.
EPRT_DEVICE void send_counts(const DispatchParams& p, const Routing& routing, const Begun& begun, int thread) {
  constexpr int kPlaceWarps = kPlaceThreads / kWarp;
  const Context& c = p.context;
  const int lane = thread % kWarp, width = c.num_slots + 1, stride = int(gridDim.x) * kPlaceWarps;
  for (int word = blockIdx.x + thread / kWarp * gridDim.x; word < kRanks * width; word += stride) {
    const int r = word / width, e = word % width;
    if ((begun.masked >> r) & 1) continue;
    const int n = e < c.num_slots ? count_entries(routing, r << 10 | e, p.num_tokens * kTopk, lane)
                                  : count_tokens(p, routing, r, lane);
    if (lane != 0) continue;
    store_relaxed(count_at(c, r, begun.epoch, c.rank) + e, uint64_t(begun.epoch) << 32 | uint32_t(n));
    if (kStats && e == c.num_slots) add_to_total(c.stats.tokens + r, int64_t(n));
  }
}

EPRT_DEVICE void send_header(const DispatchParams& p, const Routing& routing, uint32_t epoch, int token,
                             const Destinations& d, int group_warp, int lane) {
  const Context& c = p.context;
  for (int n = group_warp; n < d.count; n += kGroupWarps) {
    Header* header = reinterpret_cast<Header*>(message_at(c, d.rank[n], epoch, c.rank, d.position[n]));
    if (lane == 0) header->token = token, header->row = d.row[n];
    if (lane >= kTopk) continue;
    const int entry = routing.entry[token * kTopk + lane];
    header->slot[lane] = entry >= 0 && entry >> 10 == d.rank[n] ? (entry & 1023) << 16 | d.index[lane] : -1;
    header->weight[lane] = p.topk_weight ? p.topk_weight[token * kTopk + lane] : 0.f;
  }
}

EPRT_DEVICE void send_payload(const DispatchParams& p, const Unit (&units)[kThreadUnits], uint32_t epoch,
                              const Destinations& d, int group_thread) {
  const Context& c = p.context;
#pragma unroll
  for (int i = 0; i < kThreadUnits; ++i) {
    const int unit = group_thread + i * kGroupThreads;
    float scale = 0.f;
    Vec16 fp8;
    if (kFp8) fp8 = quantize(units[i], p.scale_format != kFloat, &scale);
    if (unit >= kUnits) continue;
    for (int n = 0; n < d.count; ++n) {
      uint8_t* to = message_at(c, d.rank[n], epoch, c.rank, d.position[n]) + kHeaderBytes;
      if (kFp8) {
        store(to + unit * 16, fp8);
        if (unit % 8 == 0) reinterpret_cast<float*>(to + kHidden)[unit / 8] = scale;
      } else {
        store(to + unit * 32, units[i].lo);
        store(to + unit * 32 + 16, units[i].hi);
      }
    }
  }
}

EPRT_DEVICE void load_token(const DispatchParams& p, int token, int group_thread, Unit (&units)[kThreadUnits]) {
  if (token >= p.num_tokens) return;
  const uint8_t* x = p.x + int64_t(token) * kHidden * 2;
#pragma unroll
  for (int i = 0; i < kThreadUnits; ++i) {
    // Past the end, load the last unit again: it does not change its group's scale, and it is not sent.
    const int unit = min(group_thread + i * kGroupThreads, kUnits - 1);
    units[i] = {load_streaming(x + unit * 32), load_streaming(x + unit * 32 + 16)};
  }
}

EPRT_DEVICE void send_tokens(const DispatchParams& p, const Routing& routing, const Begun& begun,
                             Unit (&units)[kThreadUnits], Destinations& d, int group, int lane) {
  const int group_thread = threadIdx.x % kGroupThreads, group_warp = group_thread / kWarp;
  const int first = blockIdx.x + group * gridDim.x, step = gridDim.x * num_senders(p);
  for (int token = first; token < p.num_tokens; token += step) {
    if (token != first) barrier_sync(kRead + group, kGroupThreads + kWarp);
    find_destinations(routing, token, begun.masked, &d, group_warp, lane);
    barrier_sync(kGroup + group, kGroupThreads);
    send_payload(p, units, begun.epoch, d, group_thread);
    load_token(p, token + step, group_thread, units);  // in flight while this token is finished
    send_header(p, routing, begun.epoch, token, d, group_warp, lane);
    barrier_arrive(kStored + group, kGroupThreads + kWarp);
  }
}

EPRT_DEVICE void send(const DispatchParams& p, const Routing& routing, const Begun& begun, Destinations* destinations) {
  const Context& c = p.context;
  const int group = threadIdx.x / kGroupThreads, lane = threadIdx.x % kWarp;
  // Issue the first loads of global memory together: here the first token and the routing; at the same time the
  // placing threads load epoch and mask.
  Unit units[kThreadUnits];
  if (group < num_senders(p)) load_token(p, blockIdx.x + group * gridDim.x, threadIdx.x % kGroupThreads, units);
  read_entries(p, routing);
  sync_begun();
  mark_ranks(p, routing, lane);
  sync_workers();
  stamp(c, 1);
  if (group < num_senders(p)) send_tokens(p, routing, begun, units, destinations[group], group, lane);
  stamp(c, 3);
}

// What a group's flag warp does: raises the flags of each token that the group sends.
EPRT_DEVICE void raise_flags(const DispatchParams& p, const Begun& begun, const Destinations* destinations, int group,
                             int lane) {
  const Context& c = p.context;
  const Destinations& d = destinations[group];
  if (group >= num_senders(p)) return;
  const int step = gridDim.x * num_senders(p);
  for (int token = blockIdx.x + group * gridDim.x; token < p.num_tokens; token += step) {
    barrier_sync(kStored + group, kGroupThreads + kWarp);
    const uint32_t epoch = begun.epoch;
    uint8_t* message = nullptr;
    if (lane < d.count) message = message_at(c, d.rank[lane], epoch, c.rank, d.position[lane]);
    if (token + step < p.num_tokens) barrier_arrive(kRead + group, kGroupThreads + kWarp);
    // The barrier kStored orders the group's stores before this release (cumulativity).
    if (message) store_release_sys(reinterpret_cast<uint32_t*>(message), epoch);
    __syncwarp();
  }
}

}  // namespace eprt::low_latency
