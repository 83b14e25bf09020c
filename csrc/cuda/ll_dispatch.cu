// Low-latency dispatch. Send: a token goes once to each rank that holds one of its slots, cast to fp8 on the way.
// Receive: the rank expands what arrived into rows grouped by local slot, ordered by (source rank, token, k).
#include "low_latency.cuh"

namespace eprt {

constexpr int kGroups = 2;  // tokens a thread block sends at once
constexpr int kGroupThreads = kThreads / kGroups;
constexpr int kGroupWarps = kGroupThreads / kWarp;
constexpr int kAllThreads = kThreads + kGroups * kWarp;  // with a warp for each group that raises its flags
constexpr int kUnits = kHidden / 16;                     // a unit: 16 values, one 16-byte fp8 store
constexpr int kThreadUnits = ceil_div(kUnits, kGroupThreads);
constexpr int kMessageParts = ceil_div(kPayloadVectors, 2 * kPartVectors);  // a warp expands one part
constexpr int kMessageLane = 2 * kPartLane;
constexpr uint64_t kTicketsPerCall = 1024;  // more than thread blocks in a launch, whatever their number

struct DispatchParams {
  Context context;
  Handle handle;
  const uint8_t* x;          // bf16 [T, H]
  const void* topk_slot;     // [T, K] global slot or -1
  const float* topk_weight;  // [T, K]
  uint8_t* recv_x;           // fp8 or bf16 [rows, H]
  float* recv_scale;         // element (row, g) at row * scale_row_stride + g * scale_group_stride
  int32_t* recv_count;       // [L]
  int64_t scale_row_stride;
  int64_t scale_group_stride;
  int32_t num_tokens;   // T
  int32_t slot_bytes;   // of one topk_slot: 4 or 8
  int32_t slot_stride;  // rows between the first rows of two slots; 0: compact, each aligned to `alignment`
  int32_t alignment;
  int32_t ue8m0;
  int32_t phases;
};

// A release waits until the group's stores have reached the peers, some microseconds. So a warp of its own does it
// while the group goes on: it learns by kStored that a token is stored and which, and by kRead lets the group take the
// next.
enum Barrier : int { kWorkers = 1, kGroup = 2, kStored = kGroup + kGroups, kRead = kStored + kGroups };

EPRT_DEVICE void sync_workers() { barrier_sync(kWorkers, kThreads); }

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

// Masked ranks get nothing, but keep their place among the combine rows.
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
    d->row[n] = __popc(ranks & before);
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
    header->weight[lane] = p.topk_weight[token * kTopk + lane];
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
    if (kFp8) fp8 = quantize(units[i], p.ue8m0, &scale);
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

// ---- receive
// ---------------------------------------------------------------------------------------------------------

struct Placement {      // in shared memory
  int32_t* begin;       // [R][L + 1]: rows of a slot before those of the source; [L]: tokens before the source's
  int32_t* slot_begin;  // [L + 1]: first row of a slot
  int32_t* slot_rows;   // [L + 1]; [L]: tokens received
};

EPRT_DEVICE int receive_count(const Context& c, WaitBook* book, uint32_t epoch, int source, int e) {
  if (load_relaxed(c.deadline.mask + source)) return 0;
  const uint64_t* word = count_at(c, c.rank, epoch, source) + e;
  uint64_t seen = load_relaxed(word);
  if (uint32_t(seen >> 32) != epoch) {
    // Little-endian: the epoch is the upper half. One 8-byte store wrote both, so that seeing one is seeing the other.
    if (!wait_peer(c, book, reinterpret_cast<const uint32_t*>(word) + 1, epoch, kDispatchCounts, source)) return 0;
    seen = load_relaxed(word);
  }
  return uint32_t(seen);
}

EPRT_DEVICE void place_slots(const DispatchParams& p, const Placement& place, int lane) {  // warp 0
  const int num_slots = p.context.num_slots;
  int base = 0;
  for (int first = 0; first <= num_slots; first += kWarp) {
    const int e = first + lane;
    const int rows = e < num_slots ? ceil_div(place.slot_rows[e], p.alignment) * p.alignment : 0;
    int sum = rows;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int below = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += below;
    }
    if (e <= num_slots) place.slot_begin[e] = p.slot_stride ? e * p.slot_stride : base + sum - rows;
    base += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
}

EPRT_DEVICE Placement place_rows(const DispatchParams& p, WaitBook* book, uint32_t epoch, uint8_t* smem) {
  const Context& c = p.context;
  const int width = c.num_slots + 1;
  int32_t* words = reinterpret_cast<int32_t*>(smem);
  const Placement place{words, words + kRanks * width, words + (kRanks + 1) * width};
  for (int i = threadIdx.x; i < kRanks * width; i += kThreads)
    place.begin[i] = receive_count(c, book, epoch, i / width, i % width);
  sync_workers();
  stamp(c, 6);
  for (int e = threadIdx.x; e < width; e += kThreads) {
    int sum = 0;
    for (int source = 0; source < kRanks; ++source) {
      const int count = place.begin[source * width + e];
      place.begin[source * width + e] = sum;
      sum += count;
    }
    place.slot_rows[e] = sum;
  }
  sync_workers();
  if (threadIdx.x < kWarp) place_slots(p, place, threadIdx.x);
  sync_workers();
  return place;
}

// Block 0: what the caller, combine and the statistics need to know.
EPRT_DEVICE void publish_counts(const DispatchParams& p, const Placement& place) {
  const Context& c = p.context;
  const int width = c.num_slots + 1;
  for (int e = threadIdx.x; e < width; e += kThreads) {
    p.handle.slot_begin[e] = place.slot_begin[e];
    if (e == c.num_slots) continue;
    p.recv_count[e] = place.slot_rows[e];
    if (kStats) c.stats.slot_rows[e] += place.slot_rows[e];
  }
  if (threadIdx.x < kRanks) {
    const int* tokens = place.begin + c.num_slots;
    const int end = threadIdx.x + 1 < kRanks ? tokens[(threadIdx.x + 1) * width] : place.slot_rows[c.num_slots];
    const int count = end - tokens[threadIdx.x * width];
    p.handle.source_items[threadIdx.x] = count;
    if (kStats) c.stats.tokens[kRanks + threadIdx.x] += count;
  }
  if (kStats && threadIdx.x == 0) *c.stats.calls += 1;
}

constexpr int kScalesLane = ceil_div(kScales, kWarp);

// What only the warp of a token's first part handles: scales, and what combine will want to know.
struct Extras {
  uint32_t scale[kScalesLane];
  uint32_t weight, token_and_row;  // of lane k; of lanes 0 and 1
};

EPRT_DEVICE Extras load_extras(const uint8_t* message, int lane) {
  const Header* header = reinterpret_cast<const Header*>(message);
  const uint32_t* scales = reinterpret_cast<const uint32_t*>(message + kHeaderBytes + kHidden);
  Extras extras = {};
#pragma unroll
  for (int i = 0; i < kScalesLane; ++i)
    if (kFp8 && lane + i * kWarp < kScales) extras.scale[i] = load_relaxed(scales + lane + i * kWarp);
  if (lane < kTopk) extras.weight = load_relaxed(reinterpret_cast<const uint32_t*>(header->weight) + lane);
  if (lane < 2) extras.token_and_row = load_relaxed(reinterpret_cast<const uint32_t*>(&header->token) + lane);
  return extras;
}

EPRT_DEVICE void store_extras(const DispatchParams& p, const Extras& extras, int item, int row, uint32_t wanted,
                              int lane) {
  for (uint32_t left = kFp8 ? wanted : 0; left; left &= left - 1) {
    float* to = p.recv_scale + __shfl_sync(kAllLanes, row, __ffs(left) - 1) * p.scale_row_stride;
#pragma unroll
    for (int i = 0; i < kScalesLane; ++i)
      if (lane + i * kWarp < kScales) to[(lane + i * kWarp) * p.scale_group_stride] = __uint_as_float(extras.scale[i]);
  }
  if (lane < kTopk) {
    p.handle.item_row[item * kTopk + lane] = row;
    p.handle.item_weight[item * kTopk + lane] = __uint_as_float(extras.weight);
    if (row >= 0) p.handle.row_item[row] = item;
  }
  if (lane < 2) p.handle.item_token[item * 2 + lane] = extras.token_and_row;
  if (lane == 0) p.handle.item_left[item] = __popc(wanted);
}

// One part of one token: one warp.
EPRT_DEVICE void expand(const DispatchParams& p, WaitBook* book, const Placement& place, uint32_t epoch, int source,
                        int position, int part, int lane) {
  const Context& c = p.context;
  const uint8_t* message = message_at(c, c.rank, epoch, source, position);
  const Header* header = reinterpret_cast<const Header*>(message);
  if (!wait_peer(c, book, &header->epoch, epoch, kDispatchTokens, source)) return;
  // All loads before the first use of any.
  const int entry = lane < kTopk ? int(load_relaxed(reinterpret_cast<const uint32_t*>(header->slot) + lane)) : -1;
  constexpr int kLength = ceil_div(kPayloadVectors, kMessageParts);
  const int start = part * kLength + lane, end = min(kPayloadVectors, (part + 1) * kLength);
  Vec16 v[kMessageLane];
#pragma unroll
  for (int i = 0; i < kMessageLane; ++i)
    if (start + i * kWarp < end) v[i] = load_peer_written(message + kHeaderBytes + (start + i * kWarp) * 16);
  Extras extras;
  if (part == 0) extras = load_extras(message, lane);
  int row = -1;
  if (entry >= 0) {
    const int e = entry >> 16;
    row = place.slot_begin[e] + place.begin[source * (c.num_slots + 1) + e] + (entry & 0xffff);
  }
  const uint32_t wanted = __ballot_sync(kAllLanes, row >= 0);
  for (uint32_t left = wanted; left; left &= left - 1) {
    const int64_t to_row = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
    uint8_t* to = p.recv_x + to_row * kPayloadVectors * 16;
#pragma unroll
    for (int i = 0; i < kMessageLane; ++i)
      if (start + i * kWarp < end) store(to + (start + i * kWarp) * 16, v[i]);
  }
  if (part == 0) store_extras(p, extras, source * c.max_tokens + position, row, wanted, lane);
}

EPRT_DEVICE void receive(const DispatchParams& p, uint32_t epoch, uint8_t* smem) {
  __shared__ WaitBook book;
  const Context& c = p.context;
  open_book(&book);
  sync_workers();
  stamp(c, 5);
  const Placement place = place_rows(p, &book, epoch, smem);
  stamp(c, 7);
  if (blockIdx.x == 0) publish_counts(p, place);
  const int lane = threadIdx.x % kWarp;
  const int num_units = place.slot_rows[c.num_slots] * kMessageParts;
  const int first_item = lane < kRanks ? place.begin[lane * (c.num_slots + 1) + c.num_slots] : 0x7fffffff;
  for (int unit = blockIdx.x + (threadIdx.x / kWarp) * gridDim.x; unit < num_units; unit += gridDim.x * kWarps) {
    const int item = unit / kMessageParts;
    const int source = 31 - __clz(__ballot_sync(kAllLanes, first_item <= item));
    const int position = item - __shfl_sync(kAllLanes, first_item, source);
    expand(p, &book, place, epoch, source, position, unit % kMessageParts, lane);
    __syncwarp();
  }
  sync_workers();
  stamp(c, 8);
  close_book(c, &book, 0);
  if (kStats && blockIdx.x == 0 && threadIdx.x == 0) *p.handle.received_ns = global_timer_ns();
}

}  // namespace eprt

extern "C" __global__ void __launch_bounds__(eprt::kAllThreads, 1)
    ll_dispatch(const __grid_constant__ eprt::DispatchParams p) {
  using namespace eprt;
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ uint32_t epoch_shared, masked_shared;
  __shared__ Destinations destinations[kGroups];
  const Context& c = p.context;
  const int lane = threadIdx.x % kWarp;
  const bool sends = p.phases & kSend;
  stamp(c, 0);
  if (threadIdx.x >= kThreads) {
    if (sends) raise_flags(p, epoch_shared, destinations, (threadIdx.x - kThreads) / kWarp, lane);
    return;
  }
  // Three loads from far away at once: epoch, mask and (in load_routing) the routing.
  if (threadIdx.x == kThreads - 1) {
    if (sends) {
      const uint64_t tickets = blockIdx.x == 0 ? kTicketsPerCall - (gridDim.x - 1) : 1;
      epoch_shared = uint32_t(fetch_add(c.ticket, tickets) / kTicketsPerCall) + 1;
      if (blockIdx.x == 0) *p.handle.epoch = epoch_shared;
    } else {
      epoch_shared = *p.handle.epoch;
    }
  }
  if (threadIdx.x / kWarp == kWarps - 2) {
    const uint32_t masked = __ballot_sync(kAllLanes, lane < kRanks && load_relaxed(c.deadline.mask + lane));
    if (lane == 0) masked_shared = masked;
  }
  if (sends) {
    const Routing routing = load_routing(p, smem);
    stamp(c, 1);
    uint8_t* scratch = reinterpret_cast<uint8_t*>(routing.to_rank + kRanks * routing.words);
    send(p, routing, epoch_shared, masked_shared, destinations, scratch);
  }
  sync_workers();  // the receiving side uses the same shared memory
  if (p.phases & kRecv) receive(p, epoch_shared, smem);
}
