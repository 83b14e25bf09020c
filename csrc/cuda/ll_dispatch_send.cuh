// Low-latency dispatch, sending side: a token goes once to each rank that holds one of its slots, cast to fp8 on the
// way.
#pragma once
#include "ll_dispatch.cuh"

namespace eprt::low_latency {

// ---- routing: every thread block reads the whole batch's, so that it can number its tokens without asking anyone
// -----

struct Routing {      // in shared memory
  int16_t* entry;     // [T * K] rank << 10 | local slot, or -1; padded with -1 to a multiple of 8
  uint32_t* to_rank;  // [R][words]: bit t set when a slot of token t lies on that rank
  int words;
};

EPRT_DEVICE int read_slot(const DispatchParams& p, int i) {
  const Context& c = p.context;
  const int64_t slot =
      p.slot_bytes == 8 ? static_cast<const int64_t*>(p.topk_slot)[i] : static_cast<const int32_t*>(p.topk_slot)[i];
  if (slot >= -1 && slot < c.num_slots * kRanks) return int(slot);
  if (blockIdx.x == 0) report(c.deadline.failure, kBadSlot, uint32_t(slot >> 32), uint32_t(slot), i);
  return -1;
}

EPRT_DEVICE Routing load_routing(const DispatchParams& p, uint8_t* smem) {
  const Context& c = p.context;
  const int num_entries = p.num_tokens * kTopk, padded = ceil_div(num_entries, 8) * 8;
  Routing routing{reinterpret_cast<int16_t*>(smem), reinterpret_cast<uint32_t*>(smem + padded * 2),
                  ceil_div(p.num_tokens, kWarp)};
  for (int i = threadIdx.x; i < padded; i += kThreads) {
    const int slot = i < num_entries ? read_slot(p, i) : -1;
    routing.entry[i] = slot < 0 ? -1 : slot / c.num_slots << 10 | slot % c.num_slots;
  }
  sync_workers();
  const int lane = threadIdx.x % kWarp;
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
  sync_workers();
  return routing;
}

// How many tokens before `token` go to `rank`: the token's place in that rank's list.
EPRT_DEVICE int position_of(const Routing& routing, int token, int rank) {
  const uint32_t* to_rank = routing.to_rank + rank * routing.words;
  int n = __popc(to_rank[token / kWarp] & ((1u << (token % kWarp)) - 1));
  for (int i = 0; i < token / kWarp; ++i) n += __popc(to_rank[i]);
  return n;
}

// How many entries before entry i name the same slot. One warp; all lanes get it.
EPRT_DEVICE int index_in_slot(const Routing& routing, int i, int lane) {
  const int entry = routing.entry[i], whole = i / 8;
  int n = 0;
  for (int v = lane; v < whole; v += kWarp) {
    const Vec16 eight = reinterpret_cast<const Vec16*>(routing.entry)[v];
#pragma unroll
    for (int j = 0; j < 4; ++j) n += __popc(__vcmpeq2(eight.w[j], entry * 0x10001u));
  }
  n /= 16;
  if (lane < i % 8) n += routing.entry[whole * 8 + lane] == entry;
  return __reduce_add_sync(kAllLanes, n);
}

struct Destinations {  // of one token, in shared memory
  int count;
  int rank[kRanks];
  int position[kRanks];
  int row[kRanks];
  int index[kTopk];
};

EPRT_DEVICE int combine_row(const Routing& routing, int token, int rank) {
  if (kRowIsRank) return rank;
  int row = 0;
  for (int k = kTopk - 1; k >= 0; --k)
    if (routing.entry[token * kTopk + k] >= 0 && routing.entry[token * kTopk + k] >> 10 == rank) row = k;
  return row;
}

// Masked ranks get nothing.
EPRT_DEVICE void find_destinations(const Routing& routing, int token, uint32_t masked, Destinations* d, int group_warp,
                                   int lane) {
  for (int k = group_warp; k < kTopk; k += kGroupWarps) {
    const int i = token * kTopk + k;
    const int index = routing.entry[i] < 0 ? 0 : index_in_slot(routing, i, lane);
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

// ---- send
// ------------------------------------------------------------------------------------------------------------

struct Unit {
  Vec16 lo, hi;  // 16 bf16 values
};

// Eight neighbouring lanes hold one scale group of 128 values; all of them take part in the shuffles.
EPRT_DEVICE Vec16 quantize(const Unit& u, bool ue8m0, float* scale) {
  float v[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = bf16_lo(u.lo.w[i]), v[2 * i + 1] = bf16_hi(u.lo.w[i]);
    v[8 + 2 * i] = bf16_lo(u.hi.w[i]), v[9 + 2 * i] = bf16_hi(u.hi.w[i]);
  }
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(v[i]));
#pragma unroll
  for (int lane = 1; lane < 8; lane *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, lane));
  const Fp8Scale s = fp8_scale(amax, ue8m0);
  *scale = s.scale;
  Vec16 out;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out.w[i] = pack_fp8(v[4 * i] * s.factor, v[4 * i + 1] * s.factor, v[4 * i + 2] * s.factor, v[4 * i + 3] * s.factor);
  return out;
}

// Tells rank r how many rows and tokens this rank sends it, in words that carry the epoch: no fence, no flag.
EPRT_DEVICE void send_counts(const DispatchParams& p, const Routing& routing, uint32_t epoch, int r,
                             int32_t* histogram) {
  const Context& c = p.context;
  for (int e = threadIdx.x; e <= c.num_slots; e += kThreads) histogram[e] = 0;
  sync_workers();
  for (int i = threadIdx.x; i < p.num_tokens * kTopk; i += kThreads) {
    const int entry = routing.entry[i];
    if (entry >= 0 && entry >> 10 == r) atomicAdd(histogram + (entry & 1023), 1);
  }
  if (threadIdx.x < routing.words)
    atomicAdd(histogram + c.num_slots, __popc(routing.to_rank[r * routing.words + threadIdx.x]));
  sync_workers();
  uint64_t* counts = count_at(c, r, epoch, c.rank);
  for (int e = threadIdx.x; e <= c.num_slots; e += kThreads)
    store_relaxed(counts + e, uint64_t(epoch) << 32 | uint32_t(histogram[e]));
  if (kStats && threadIdx.x == 0) c.stats.tokens[r] += histogram[c.num_slots];
  sync_workers();
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
  const uint8_t* x = p.x + int64_t(token) * kHidden * 2;
#pragma unroll
  for (int i = 0; i < kThreadUnits; ++i) {
    const int unit = group_thread + i * kGroupThreads;
    if (unit < kUnits)
      units[i] = {load_streaming(x + unit * 32), load_streaming(x + unit * 32 + 16)};
    else
      units[i] = Unit{};
  }
}

EPRT_DEVICE void send(const DispatchParams& p, const Routing& routing, uint32_t epoch, uint32_t masked,
                      Destinations* destinations, uint8_t* scratch) {
  const Context& c = p.context;
  const int group = threadIdx.x / kGroupThreads, group_thread = threadIdx.x % kGroupThreads;
  const int group_warp = group_thread / kWarp, lane = threadIdx.x % kWarp;
  // The last blocks: those with a token less when tokens do not divide evenly.
  for (int r = gridDim.x - 1 - blockIdx.x; r < kRanks; r += gridDim.x)
    if (!((masked >> r) & 1)) send_counts(p, routing, epoch, r, reinterpret_cast<int32_t*>(scratch));
  stamp(c, 2);
  Destinations& d = destinations[group];
  const int first = blockIdx.x + group * gridDim.x;
  for (int token = first; token < p.num_tokens; token += gridDim.x * kGroups) {
    Unit units[kThreadUnits];
    load_token(p, token, group_thread, units);
    if (token != first) barrier_sync(kRead + group, kGroupThreads + kWarp);
    find_destinations(routing, token, masked, &d, group_warp, lane);
    barrier_sync(kGroup + group, kGroupThreads);
    send_payload(p, units, epoch, d, group_thread);
    send_header(p, routing, epoch, token, d, group_warp, lane);
    barrier_arrive(kStored + group, kGroupThreads + kWarp);
  }
  stamp(c, 3);
}

// The warp that raises a group's flags, token by token as send() goes.
EPRT_DEVICE void raise_flags(const DispatchParams& p, const uint32_t& epoch_shared, const Destinations* destinations,
                             int group, int lane) {
  const Context& c = p.context;
  const Destinations& d = destinations[group];
  const int step = gridDim.x * kGroups;
  for (int token = blockIdx.x + group * gridDim.x; token < p.num_tokens; token += step) {
    barrier_sync(kStored + group, kGroupThreads + kWarp);
    const uint32_t epoch = epoch_shared;
    uint8_t* message = nullptr;
    if (lane < d.count) message = message_at(c, d.rank[lane], epoch, c.rank, d.position[lane]);
    if (token + step < p.num_tokens) barrier_arrive(kRead + group, kGroupThreads + kWarp);
    // The first barrier puts the group's stores before this release (cumulativity).
    if (message) store_release_sys(reinterpret_cast<uint32_t*>(message), epoch);
    __syncwarp();
  }
}

}  // namespace eprt::low_latency
