// Low-latency dispatch, receiving side: the rank expands what arrived into rows grouped by local slot, ordered by
// (source rank, token, k).
#pragma once
#include "ll_dispatch.cuh"

namespace eprt::low_latency {

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
    if (p.recv_total) p.recv_total[e] += place.slot_rows[e];
    if (kStats) c.stats.slot_rows[e] += place.slot_rows[e];
  }
  for (int i = threadIdx.x; p.recv_range && i < kRanks * c.num_slots; i += kThreads) {
    const int e = i / kRanks, source = i % kRanks, begin = place.begin[source * width + e];
    const int end = source + 1 < kRanks ? place.begin[(source + 1) * width + e] : place.slot_rows[e];
    p.recv_range[i] = int64_t(begin) << 32 | (end - begin);
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

// Element of recv_scale where a row's scales start. to_slot, to_row: of this copy of the token.
EPRT_DEVICE int64_t scale_at(const DispatchParams& p, int to_slot, int to_row) {
  return to_slot * p.scale_slot_stride + to_row * p.scale_row_stride;
}

EPRT_DEVICE void store_scales(const DispatchParams& p, const Extras& extras, int to_slot, int to_row, int lane) {
  float* to = static_cast<float*>(p.recv_scale) + scale_at(p, to_slot, to_row);
#pragma unroll
  for (int i = 0; i < kScalesLane; ++i)
    if (lane + i * kWarp < kScales) to[(lane + i * kWarp) * p.scale_group_stride] = __uint_as_float(extras.scale[i]);
}

EPRT_DEVICE void store_exponents(const DispatchParams& p, const Extras& extras, int to_slot, int to_row, int lane) {
  int32_t* to = static_cast<int32_t*>(p.recv_scale) + scale_at(p, to_slot, to_row);
#pragma unroll
  for (int i = 0; i < kScalesLane; ++i) {
    uint32_t four = extras.scale[i] >> 23;
    four |= __shfl_down_sync(kAllLanes, four, 1) << 8;
    four |= __shfl_down_sync(kAllLanes, four, 2) << 16;
    const int g = lane + i * kWarp;
    if (g % 4 == 0 && g < kScales) to[g / 4 * p.scale_group_stride] = int32_t(four);
  }
}

EPRT_DEVICE void store_extras(const DispatchParams& p, const Extras& extras, int item, int slot, int row,
                              uint32_t wanted, int lane) {
  for (uint32_t left = kFp8 ? wanted : 0; left; left &= left - 1) {
    const int k = __ffs(left) - 1;
    const int to_slot = __shfl_sync(kAllLanes, slot, k), to_row = __shfl_sync(kAllLanes, row, k);
    if (p.scale_format == kExponents)
      store_exponents(p, extras, to_slot, to_row, lane);
    else
      store_scales(p, extras, to_slot, to_row, lane);
  }
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

// The row of entry `entry` (Header::slot) of a source, or -1.
EPRT_DEVICE int row_of(const DispatchParams& p, const Placement& place, int source, int entry) {
  if (entry < 0) return -1;
  const Context& c = p.context;
  const int e = entry >> 16, index = place.begin[source * (c.num_slots + 1) + e] + (entry & 0xffff);
  if (p.slot_stride == 0 || index < p.slot_stride) return place.slot_begin[e] + index;
  report(c.deadline.failure, kSlotFull, e, index, p.slot_stride);
  return -1;
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
  const int row = row_of(p, place, source, entry);
  const uint32_t wanted = __ballot_sync(kAllLanes, row >= 0);
  for (uint32_t left = wanted; left; left &= left - 1) {
    const int64_t to_row = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
    uint8_t* to = p.recv_x + to_row * kPayloadVectors * 16;
#pragma unroll
    for (int i = 0; i < kMessageLane; ++i)
      if (start + i * kWarp < end) store(to + (start + i * kWarp) * 16, v[i]);
  }
  if (part == 0) store_extras(p, extras, source * c.max_tokens + position, entry >> 16, row, wanted, lane);
}

EPRT_DEVICE void receive(const DispatchParams& p, uint32_t epoch, uint8_t* smem) {
  __shared__ WaitBook book;
  const Context& c = p.context;
  open_book(&book, blockIdx.x == 0);
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
  close_book(c, &book, 0, p.wait_cost);
  if (kStats && blockIdx.x == 0 && threadIdx.x == 0) *p.handle.received_ns = global_timer_ns();
}

}  // namespace eprt::low_latency
