// Low-latency dispatch, receiving side: copies arrived tokens to rows grouped by local slot, ordered by (source rank,
// token, k).
#pragma once
#include "low_latency_hand_on.cuh"

namespace eprt::low_latency {

// ---- receive --------------------------------------------------------------------------------------------------------

constexpr int kCountLoads = 4;   // words that a thread loads at once
constexpr int kCountSpins = 32;  // polls before a thread waits with a deadline

EPRT_DEVICE int late_count(const Context& c, WaitBook* book, uint32_t epoch, int source, const uint64_t* word) {
  // Little-endian: the epoch is the upper half. One 8-byte store wrote both halves, so who sees one sees the other.
  const uint32_t* flag = reinterpret_cast<const uint32_t*>(word) + 1;
  return wait_peer(c, book, flag, epoch, kDispatchCounts, source) ? int(load_relaxed(word)) : 0;
}

// Writes what each source counted to place.counted; 0 for masked sources.
EPRT_DEVICE void receive_counts(const Context& c, WaitBook* book, const Begun& begun, const Placement& place,
                                int thread) {
  const int width = count_words(c), num_words = kRanks * width;
  const uint64_t* words = count_at(c, c.rank, begun.epoch, 0);  // source 0's; the other sources' follow
#pragma unroll 1
  for (int first = thread; first < num_words; first += kCountLoads * kPlaceThreads) {
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < kCountLoads; ++j) {
      const int i = first + j * kPlaceThreads;
      if (i >= num_words) continue;
      place.counted[i] = 0;
      if (!((begun.masked >> rank_of(i, width)) & 1)) missing |= 1u << j;
    }
#pragma unroll 1
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
        place.counted[i] = int(seen[j]);
        missing &= ~(1u << j);
        if (spin) note_wait(book, rank_of(i, width), now);
      }
    }
#pragma unroll 1
    for (; missing; missing &= missing - 1) {
      const int i = first + (__ffs(missing) - 1) * kPlaceThreads;
      place.counted[i] = late_count(c, book, begun.epoch, rank_of(i, width), words + i);
    }
  }
}

// The slots' first rows in the compact layout. Called by one warp.
EPRT_DEVICE void place_slots(const DispatchParams& p, const Placement& place, int lane) {
  const int num_slots = p.context.num_slots;
  int base = 0;
#pragma unroll 1
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
  EPRT_WIRED(await_counts(c, book, begun.epoch, begun.masked, thread); sync_placers();)
  receive_counts(c, book, begun, place, thread);
  sync_placers();
  stamp(c, 6, kThreads);
  for (int e = thread; e < c.num_slots; e += kPlaceThreads) {
    int sum = 0;
    for (int source = 0; source < kRanks; ++source) {
      const int count = place.begin(source)[e];
      place.begin(source)[e] = sum;
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
  for (int e = thread; e < c.num_slots; e += kPlaceThreads) {
    p.handle.slot_begin[e] = place.slot_begin[e];
    p.recv_count[e] = p.slot_stride ? min(place.slot_rows[e], p.slot_stride) : place.slot_rows[e];
    if (p.recv_total) add_to_total(p.recv_total + e, place.slot_rows[e]);
  }
  for (int i = thread; p.recv_range && i < kRanks * c.num_slots; i += kPlaceThreads) {
    const int e = i / kRanks, source = i % kRanks, begin = place.begin(source)[e];
    const int end = source + 1 < kRanks ? place.begin(source + 1)[e] : place.slot_rows[e];
    p.recv_range[i] = int64_t(begin) << 32 | (end - begin);
  }
  if (thread < kRanks) {
    const int count = place.count_tokens(thread, place.words * 32);
    p.handle.source_items[thread] = count;
    if (kStats) add_to_total(c.stats.tokens + kRanks + thread, int64_t(count));
  }
  if (kStats && thread == 0) add_to_total(c.stats.calls, int64_t(1));
}

// What combine needs of a token. Only the warp of the token's first part stores it.
EPRT_DEVICE void store_extras(const DispatchParams& p, const MessagePart& part, int token, int item, int row,
                              uint32_t wanted, int lane) {
  const float weight = part.weight(lane);
  const int combine_row = part.combine_row();
  if (lane < kTopk) {
    p.handle.item_row[item * kTopk + lane] = row;
    p.handle.item_weight[item * kTopk + lane] = weight;
    if (row >= 0) p.handle.row_item[row] = item;
    if (row >= 0 && p.recv_token) p.recv_token[row] = token;
  }
  if (lane < 2) p.handle.item_token[item * 2 + lane] = lane ? combine_row : token;
  if (lane == 0) p.handle.item_left[item] = __popc(wanted);
}

#ifdef NODE_RANKS
// Of a token that was not handed on: combine must not take what is left of another one.
EPRT_DEVICE void store_nothing(const DispatchParams& p, const Placement& place, int source, int token, int number,
                               int lane) {
  if (number != 0) return;
  const int item = source * p.context.max_tokens + place.count_tokens(source, token);
  if (lane < kTopk) p.handle.item_row[item * kTopk + lane] = -1;
  if (lane < 2) p.handle.item_token[item * 2 + lane] = lane ? place.hander(source) << kHanderShift : token;
}
#endif

// A part's scales, one per lane.
struct PartScale {
  int group;      // the lane's, or -1
  uint32_t bits;  // of the fp32 scale

  EPRT_DEVICE PartScale(const MessagePart& part, int number, int lane) : group(number * kPartScales + lane), bits(0) {
    const int line = lane / kChunkScales * kChunkLines + lane % kChunkScales;  // that ends in the lane's scale
#pragma unroll
    for (int q = 0; q < kPartQuads; ++q) {
      const uint32_t scale = __shfl_sync(kAllLanes, part.v[q].w[0], line % kWarpLines * kLineLanes + kLineVectors);
      if (line / kWarpLines == q) bits = scale;
    }
    if (lane >= kPartScales || group >= kScales) group = -1;
  }
  // to_slot, to_row: where this copy of the token goes.
  EPRT_DEVICE void store(const DispatchParams& p, int to_slot, int to_row) const {
    if (group < 0) return;
    const int64_t at = to_slot * p.scale_slot_stride + to_row * p.scale_row_stride;
    if (p.scale_format == kExponents)  // a byte of the int32, little-endian
      reinterpret_cast<uint8_t*>(static_cast<int32_t*>(p.recv_scale) + at +
                                 group / 4 * p.scale_group_stride)[group % 4] = uint8_t(bits >> 23);
    else
      static_cast<float*>(p.recv_scale)[at + group * p.scale_group_stride] = __uint_as_float(bits);
  }
};

// The row of an entry (its slot in the header) of a source, or -1.
EPRT_DEVICE int row_of(const DispatchParams& p, const Placement& place, int source, int entry) {
  if (entry < 0) return -1;
  const int e = entry >> 16, index = place.begin(source)[e] + (entry & 0xffff);
  if (p.slot_stride == 0 || index < p.slot_stride) return place.slot_begin[e] + index;
  report(p.context.deadline.failure, kSlotFull, e, index, p.slot_stride);
  return -1;
}

// One warp copies one part of one token to its rows.
EPRT_DEVICE void expand(const DispatchParams& p, WaitBook* book, const Placement& place, uint32_t epoch, int source,
                        int token, int number, int lane) {
  const Context& c = p.context;
  MessagePart part;
  EPRT_WIRED(if (!kLayered && !await_message(c, book, epoch, source, token, lane)) return;
             if (kLayered && is_beyond(c, source)) {
               if (!wait_handed(c, book, place, epoch, source, token, number, lane, part))
                 return store_nothing(p, place, source, token, number, lane);
             } else)
  if (!wait_part(c, book, message_at(c, c.rank, epoch, source, token), number, epoch, source, lane, part)) return;
  const int slot_and_index = part.slot(lane), entry = lane < kTopk ? slot_and_index : -1;
  const int row = row_of(p, place, source, entry), slot = entry >> 16;
  const uint32_t wanted = __ballot_sync(kAllLanes, row >= 0);
  const PartScale scale(part, number, lane);
  for (uint32_t left = wanted; left; left &= left - 1) {
    const int k = __ffs(left) - 1, to_row = __shfl_sync(kAllLanes, row, k);
    uint8_t* to = p.recv_x + int64_t(to_row) * kPayloadVectors * 16;
#pragma unroll
    for (int q = 0; q < kPartQuads; ++q) {
      const int v = number * kPartChunks * kChunkVectors + vector_of_lane(q, lane);
      if (v < kPayloadVectors && !ends_line(lane)) store(to + v * 16, part.v[q]);
    }
    if (kFp8) scale.store(p, __shfl_sync(kAllLanes, slot, k), to_row);
  }
  if (number == 0)
    store_extras(p, part, token, source * c.max_tokens + place.count_tokens(source, token), row, wanted, lane);
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
  const int lane = threadIdx.x % kWarp;
  stamp(c, 5);
  if (threadIdx.x == 0) begin_waiting(book);
  barrier_sync(kPlaced, kAllThreads);
  stamp(c, 7);
  EPRT_WIRED(if (kLayered) hand_on(p, book, place, epoch, lane);)
  int end = 0;  // after the last token of any source
  if (lane < kRanks) {
    int i = place.words;
#pragma unroll 1
    while (i > 0 && place.tokens(lane)[i - 1] == 0) --i;
    if (i) end = i * 32 - __clz(place.tokens(lane)[i - 1]);
  }
  const int num_units = __reduce_max_sync(kAllLanes, end) * kRanks * kParts;
  for (int unit = take_unit(taken, lane); unit < num_units; unit = take_unit(taken, lane)) {
    const int item = unit / kParts, source = (c.rank + item) % kRanks, token = item / kRanks;
    if (place.comes(source, token)) expand(p, book, place, epoch, source, token, unit % kParts, lane);
    __syncwarp();
  }
  if (PROFILE || blockIdx.x == 0) sync_workers();
  stamp(c, 8);
  close_book(c, book, 0, p.wait_cost);
  if (kStats && blockIdx.x == 0 && threadIdx.x == 0) *p.handle.received_ns = global_timer_ns();
}

}  // namespace eprt::low_latency
