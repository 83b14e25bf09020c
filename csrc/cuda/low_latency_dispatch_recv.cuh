// Low-latency dispatch, receiving side: copies arrived tokens to rows grouped by local slot, ordered by (source rank,
// token, k).
#pragma once
#include "low_latency_dispatch.cuh"

namespace eprt::low_latency {

// ---- receive --------------------------------------------------------------------------------------------------------

struct Placement {      // in shared memory
  int32_t* begin;       // [R][L + 1]: a slot's rows from earlier sources; [L]: tokens from earlier sources
  int32_t* slot_begin;  // [L + 1]: first row of a slot
  int32_t* slot_rows;   // [L + 1]; [L]: tokens received

  EPRT_DEVICE Placement(uint8_t* smem, int num_slots)
      : begin(reinterpret_cast<int32_t*>(smem)),
        slot_begin(begin + kRanks * (num_slots + 1)),
        slot_rows(slot_begin + num_slots + 1) {}
};

constexpr int kCountLoads = 4;   // words that a thread loads at once
constexpr int kCountSpins = 32;  // polls before a thread waits with a deadline

EPRT_DEVICE int late_count(const Context& c, WaitBook* book, uint32_t epoch, int source, const uint64_t* word) {
  // Little-endian: the epoch is the upper half. One 8-byte store wrote both halves, so who sees one sees the other.
  const uint32_t* flag = reinterpret_cast<const uint32_t*>(word) + 1;
  return wait_peer(c, book, flag, epoch, kDispatchCounts, source) ? int(load_relaxed(word)) : 0;
}

// Writes the rows and tokens that each source sends to place.begin; 0 for masked sources.
EPRT_DEVICE void receive_counts(const Context& c, WaitBook* book, const Begun& begun, const Placement& place,
                                int thread) {
  const int width = c.num_slots + 1, num_words = kRanks * width;
  const uint64_t* words = count_at(c, c.rank, begun.epoch, 0);  // source 0's; the other sources' follow
  for (int first = thread; first < num_words; first += kCountLoads * kPlaceThreads) {
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < kCountLoads; ++j) {
      const int i = first + j * kPlaceThreads;
      if (i >= num_words) continue;
      place.begin[i] = 0;
      if (!((begun.masked >> (i / width)) & 1)) missing |= 1u << j;
    }
    for (int spin = 0; missing && spin < kCountSpins; ++spin) {
      const uint64_t now = kStats && spin ? global_timer_ns() : 0;
      uint64_t seen[kCountLoads];
#pragma unroll
      for (int j = 0; j < kCountLoads; ++j)
        seen[j] = load_relaxed(words + min(first + j * kPlaceThreads, num_words - 1));
#pragma unroll
      for (int j = 0; j < kCountLoads; ++j) {
        const int i = first + j * kPlaceThreads;
        if (!((missing >> j) & 1) || uint32_t(seen[j] >> 32) != begun.epoch) continue;
        place.begin[i] = int(seen[j]);
        missing &= ~(1u << j);
        if (spin) note_wait(book, i / width, now);
      }
    }
    for (; missing; missing &= missing - 1) {
      const int i = first + (__ffs(missing) - 1) * kPlaceThreads;
      place.begin[i] = late_count(c, book, begun.epoch, i / width, words + i);
    }
  }
}

// The slots' first rows in the compact layout. Called by one warp.
EPRT_DEVICE void place_slots(const DispatchParams& p, const Placement& place, int lane) {
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
    if (e <= num_slots) place.slot_begin[e] = base + sum - rows;
    base += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
}

EPRT_DEVICE void place_rows(const DispatchParams& p, WaitBook* book, const Begun& begun, const Placement& place,
                            int thread) {
  const Context& c = p.context;
  const int width = c.num_slots + 1;
  receive_counts(c, book, begun, place, thread);
  sync_placers();
  stamp(c, 6, kFirstPlaceThread);
  for (int e = thread; e < width; e += kPlaceThreads) {
    int sum = 0;
    for (int source = 0; source < kRanks; ++source) {
      const int count = place.begin[source * width + e];
      place.begin[source * width + e] = sum;
      sum += count;
    }
    place.slot_rows[e] = sum;
    place.slot_begin[e] = e * p.slot_stride;
  }
  if (p.slot_stride) return;
  sync_placers();
  if (thread < kWarp) place_slots(p, place, thread);
}

// Called by block 0: publishes the counts for the caller, for combine and for the statistics.
EPRT_DEVICE void publish_counts(const DispatchParams& p, const Placement& place, int thread) {
  const Context& c = p.context;
  const int width = c.num_slots + 1;
  for (int e = thread; e < width; e += kPlaceThreads) {
    p.handle.slot_begin[e] = place.slot_begin[e];
    if (e == c.num_slots) continue;
    p.recv_count[e] = p.slot_stride ? min(place.slot_rows[e], p.slot_stride) : place.slot_rows[e];
    if (p.recv_total) add_to_total(p.recv_total + e, place.slot_rows[e]);
  }
  for (int i = thread; p.recv_range && i < kRanks * c.num_slots; i += kPlaceThreads) {
    const int e = i / kRanks, source = i % kRanks, begin = place.begin[source * width + e];
    const int end = source + 1 < kRanks ? place.begin[(source + 1) * width + e] : place.slot_rows[e];
    p.recv_range[i] = int64_t(begin) << 32 | (end - begin);
  }
  if (thread < kRanks) {
    const int* tokens = place.begin + c.num_slots;
    const int end = thread + 1 < kRanks ? tokens[(thread + 1) * width] : place.slot_rows[c.num_slots];
    const int count = end - tokens[thread * width];
    p.handle.source_items[thread] = count;
    if (kStats) add_to_total(c.stats.tokens + kRanks + thread, int64_t(count));
  }
  if (kStats && thread == 0) add_to_total(c.stats.calls, int64_t(1));
}

// What combine needs of a token. Only the warp of the token's first part handles it.
struct Extras {
  uint32_t weight;         // lane k < K
  uint32_t token_and_row;  // lane 0: token, lane 1: combine row
};

EPRT_DEVICE Extras load_extras(const Header* header, int lane) {
  Extras extras = {};
  if (lane < kTopk) extras.weight = load_relaxed(reinterpret_cast<const uint32_t*>(header->weight) + lane);
  if (lane < 2) extras.token_and_row = load_relaxed(reinterpret_cast<const uint32_t*>(&header->token) + lane);
  return extras;
}

EPRT_DEVICE void store_extras(const DispatchParams& p, const Extras& extras, int item, int row, uint32_t wanted,
                              int lane) {
  const uint32_t token = __shfl_sync(kAllLanes, extras.token_and_row, 0);
  if (lane < kTopk) {
    p.handle.item_row[item * kTopk + lane] = row;
    p.handle.item_weight[item * kTopk + lane] = __uint_as_float(extras.weight);
    if (row >= 0) p.handle.row_item[row] = item;
    if (row >= 0 && p.recv_token) p.recv_token[row] = int32_t(token);
  }
  if (lane < 2) p.handle.item_token[item * 2 + lane] = extras.token_and_row;
  if (lane == 0) p.handle.item_left[item] = __popc(wanted);
}

// A part's scales, one per lane.
struct PartScale {
  static constexpr int kGroups = kMessageLength * 16 / kScaleGroup;  // of a part
  int group;                                                         // the lane's, or -1
  uint32_t bits = 0;                                                 // of the fp32 scale

  EPRT_DEVICE PartScale(int part, int lane) : group(part * kGroups + lane) {
    if (!kFp8 || lane >= kGroups || group >= kScales) group = -1;
  }
  EPRT_DEVICE void load(const uint8_t* message) {
    if (group >= 0) bits = load_relaxed(reinterpret_cast<const uint32_t*>(message + kHeaderBytes + kHidden) + group);
  }
  // to_slot, to_row: where this copy of the token goes. Called by all lanes.
  EPRT_DEVICE void store(const DispatchParams& p, int to_slot, int to_row) const {
    const int64_t at = to_slot * p.scale_slot_stride + to_row * p.scale_row_stride;
    if (p.scale_format == kExponents) {
      uint32_t four = bits >> 23;
      four |= __shfl_down_sync(kAllLanes, four, 1) << 8;
      four |= __shfl_down_sync(kAllLanes, four, 2) << 16;
      if (group >= 0 && group % 4 == 0)
        static_cast<int32_t*>(p.recv_scale)[at + group / 4 * p.scale_group_stride] = int32_t(four);
    } else if (group >= 0) {
      static_cast<float*>(p.recv_scale)[at + group * p.scale_group_stride] = __uint_as_float(bits);
    }
  }
};

// The row of an entry (Header::slot) of a source, or -1.
EPRT_DEVICE int row_of(const DispatchParams& p, const Placement& place, int source, int entry) {
  if (entry < 0) return -1;
  const Context& c = p.context;
  const int e = entry >> 16, index = place.begin[source * (c.num_slots + 1) + e] + (entry & 0xffff);
  if (p.slot_stride == 0 || index < p.slot_stride) return place.slot_begin[e] + index;
  report(c.deadline.failure, kSlotFull, e, index, p.slot_stride);
  return -1;
}

// One warp copies one part of one token to its rows.
EPRT_DEVICE void expand(const DispatchParams& p, WaitBook* book, const Placement& place, uint32_t epoch, int source,
                        int position, int part, int lane) {
  const Context& c = p.context;
  const uint8_t* message = message_at(c, c.rank, epoch, source, position);
  const Header* header = reinterpret_cast<const Header*>(message);
  // All lanes or none: at the deadline one lane may see the flag on which another has given up.
  if (!__all_sync(kAllLanes, wait_peer(c, book, &header->epoch, epoch, kDispatchTokens, source))) return;
  // Issue all loads before the first use of any.
  const int entry = lane < kTopk ? int(load_relaxed(reinterpret_cast<const uint32_t*>(header->slot) + lane)) : -1;
  const int start = part * kMessageLength + lane, end = min(kPayloadVectors, (part + 1) * kMessageLength);
  Vec16 v[kMessageLane];
#pragma unroll
  for (int i = 0; i < kMessageLane; ++i)
    if (start + i * kWarp < end) v[i] = load_peer_written(message + kHeaderBytes + (start + i * kWarp) * 16);
  PartScale scale(part, lane);
  scale.load(message);
  Extras extras;
  if (part == 0) extras = load_extras(header, lane);
  const int row = row_of(p, place, source, entry), slot = entry >> 16;
  const uint32_t wanted = __ballot_sync(kAllLanes, row >= 0);
  for (uint32_t left = wanted; left; left &= left - 1) {
    const int k = __ffs(left) - 1, to_row = __shfl_sync(kAllLanes, row, k);
    uint8_t* to = p.recv_x + int64_t(to_row) * kPayloadVectors * 16;
#pragma unroll
    for (int i = 0; i < kMessageLane; ++i)
      if (start + i * kWarp < end) store(to + (start + i * kWarp) * 16, v[i]);
    if (kFp8) scale.store(p, __shfl_sync(kAllLanes, slot, k), to_row);
  }
  if (part == 0) store_extras(p, extras, source * c.max_tokens + position, row, wanted, lane);
}

// Claims the next unit of the thread block: units are parts of tokens in the expected order of arrival, token by token,
// sources in turn.
EPRT_DEVICE int take_unit(int32_t* taken, int lane) {
  int n = 0;
  if (lane == 0) n = atomicAdd(taken, 1);
  return blockIdx.x + __shfl_sync(kAllLanes, n, 0) * gridDim.x;
}

EPRT_DEVICE void receive(const DispatchParams& p, WaitBook* book, const Placement& place, uint32_t epoch,
                         int32_t* taken) {
  const Context& c = p.context;
  const int lane = threadIdx.x % kWarp, width = c.num_slots + 1;
  stamp(c, 5);
  if (threadIdx.x == 0) begin_waiting(book);
  barrier_sync(kPlaced + threadIdx.x / kGroupThreads, kGroupThreads + kPlaceThreads);
  stamp(c, 7);
  int tokens = 0;  // of the lane's source
  if (lane < kRanks) {
    const int32_t* before = place.begin + lane * width + c.num_slots;
    tokens = (lane + 1 < kRanks ? before[width] : place.slot_rows[c.num_slots]) - *before;
  }
  const int num_units = __reduce_max_sync(kAllLanes, tokens) * kRanks * kMessageParts;
  for (int unit = take_unit(taken, lane); unit < num_units; unit = take_unit(taken, lane)) {
    const int item = unit / kMessageParts, source = (c.rank + item) % kRanks, position = item / kRanks;
    if (position < __shfl_sync(kAllLanes, tokens, source))
      expand(p, book, place, epoch, source, position, unit % kMessageParts, lane);
    __syncwarp();
  }
  if (PROFILE || blockIdx.x == 0) sync_workers();
  stamp(c, 8);
  close_book(c, book, 0, p.wait_cost);
  if (kStats && blockIdx.x == 0 && threadIdx.x == 0) *p.handle.received_ns = global_timer_ns();
}

}  // namespace eprt::low_latency
