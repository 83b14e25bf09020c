// Low-latency combine. Send: the rank that ran the experts computes the weighted fp32 sum of its rows of a token and
// sends one bf16 row per token and rank to the token's owner (EXACT: one row per expert, unweighted). Receive: the
// owner sums these rows. A row travels in parts of 128 vectors, each with its own flag, so that the owner sums while
// others still send. LATE_WEIGHTS: dispatch was not told the weights; owners send them first, and the experts' ranks
// wait for them.
#include "low_latency_combine_weights.cuh"

namespace eprt::low_latency {

constexpr int kFlagBatch = 4;  // sums that a warp stores before it raises their flags; measured, see docs/dev-log.md

using Part = Vec16[kPartLane];

struct Sum {
  float v[kPartLane][8];
};

struct Span {  // one lane's vectors of a part: start, start + 32, ...
  int start, end;
};

EPRT_DEVICE Span span_of(int part, int lane) {
  constexpr int kLength = ceil_div(kRowVectors, kRowParts);
  return {part * kLength + lane, min(kRowVectors, (part + 1) * kLength)};
}

// Rounds after the product and after the sum, so the result has the same bits as on CPUs.
EPRT_DEVICE void add_weighted(Sum& sum, const Part& part, float weight) {
#pragma unroll
  for (int i = 0; i < kPartLane; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum.v[i][2 * j] = __fadd_rn(sum.v[i][2 * j], __fmul_rn(weight, bf16_lo(part[i].w[j])));
      sum.v[i][2 * j + 1] = __fadd_rn(sum.v[i][2 * j + 1], __fmul_rn(weight, bf16_hi(part[i].w[j])));
    }
}

EPRT_DEVICE void store_sum(uint8_t* to, const Sum& sum, Span span) {
#pragma unroll
  for (int i = 0; i < kPartLane; ++i) {
    Vec16 v;
#pragma unroll
    for (int j = 0; j < 4; ++j) v.w[j] = pack_bf16(sum.v[i][2 * j], sum.v[i][2 * j + 1]);
    if (span.start + i * kWarp < span.end) store(to + (span.start + i * kWarp) * 16, v);
  }
}

// kWrittenMeanwhile: the row may have been written since this kernel started.
template <bool kWrittenMeanwhile>
EPRT_DEVICE void load_part(Part& part, const uint8_t* row, Span span) {
#pragma unroll
  for (int i = 0; i < kPartLane; ++i) {
    const uint8_t* from = row + (span.start + i * kWarp) * 16;
    if (span.start + i * kWarp >= span.end)
      part[i] = Vec16{};
    else
      part[i] = kWrittenMeanwhile ? load_peer_written(from) : load_streaming(from);
  }
}

// The sum of weight(b) * row(b) over the set bits b of `wanted`, in order. The next row is loaded while one is added;
// `meanwhile` runs while the first one is loaded.
template <bool kWrittenMeanwhile, class Row, class Weight, class Meanwhile>
EPRT_DEVICE Sum sum_rows(uint32_t wanted, Span span, Row row, Weight weight, Meanwhile meanwhile) {
  Sum sum = {};
  if (wanted == 0) return sum;
  Part next;
  load_part<kWrittenMeanwhile>(next, row(__ffs(wanted) - 1), span);
  meanwhile();
  while (wanted) {
    Part now;
#pragma unroll
    for (int i = 0; i < kPartLane; ++i) now[i] = next[i];
    const int b = __ffs(wanted) - 1;
    wanted &= wanted - 1;
    if (wanted) load_part<kWrittenMeanwhile>(next, row(__ffs(wanted) - 1), span);
    add_weighted(sum, now, weight(b));
  }
  return sum;
}

// ---- send -----------------------------------------------------------------------------------------------------------

struct Item {
  int owner, token, combine_row;  // token: its index on the owner
  int row;                        // lane k < K: row of entry k, or -1
  float weight;                   // lane k < K
  LateWeight late;                // LATE_WEIGHTS, instead of weight
};

EPRT_DEVICE Item load_item(const CombineParams& p, int owner, int position, int lane) {
  const Handle& h = p.handle;
  const int64_t index = int64_t(owner) * p.context.max_tokens + position;
  Item item{owner, h.item_token[index * 2], h.item_token[index * 2 + 1], -1, 0.f, {}};
  if (lane >= kTopk) return item;
  item.row = h.item_row[index * kTopk + lane];
  if (!kLateWeights) item.weight = h.item_weight[index * kTopk + lane];
  return item;
}

// What all warps know from the start.
struct Call {
  uint64_t begin_ns;
  uint32_t epoch;
  uint32_t masked;  // a bit per rank
};

// False if the item's weights have not arrived.
EPRT_DEVICE bool wait_weights(const CombineParams& p, const Call& call, Item& item, int lane) {
  if (!kLateWeights) return true;
  const Context& c = p.context;
  const uint64_t* words = weights_at(c, c.rank, call.epoch, item.owner) + item.token * kTopk;
  return wait_weights(call.begin_ns, call.epoch, words + lane, item.late, item.row >= 0);
}

EPRT_DEVICE const uint8_t* output_row(const CombineParams& p, int row) { return p.y + int64_t(row) * kRowVectors * 16; }

// Sends one part of an expert's row unchanged. kGrowing: the experts still compute other rows.
template <bool kGrowing>
EPRT_DEVICE void send_expert_row(const CombineParams& p, uint32_t epoch, int owner, int token, int k, int row, int part,
                                 int lane) {
  const Context& c = p.context;
  const Span span = span_of(part, lane);
  Part values;
  load_part<kGrowing>(values, output_row(p, row), span);
  uint8_t* to = row_at(c, owner, epoch, token, k);
#pragma unroll
  for (int i = 0; i < kPartLane; ++i)
    if (span.start + i * kWarp < span.end) store(to + (span.start + i * kWarp) * 16, values[i]);
}

// Sends one part of a token's sum over this rank's experts; false if its weights have not arrived.
template <bool kGrowing>
EPRT_DEVICE bool send_sum(const CombineParams& p, const Call& call, Item& item, int part, int lane) {
  const Context& c = p.context;
  const Span span = span_of(part, lane);
  const uint32_t wanted = __ballot_sync(kAllLanes, item.row >= 0);
  bool known = true;
  const Sum sum = sum_rows<kGrowing>(
      wanted, span, [&](int k) { return output_row(p, __shfl_sync(kAllLanes, item.row, k)); },
      [&](int k) { return __shfl_sync(kAllLanes, kLateWeights ? item.late.value() : item.weight, k); },
      [&] { known = wait_weights(p, call, item, lane); });
  if (known) store_sum(row_at(c, item.owner, call.epoch, item.token, item.combine_row), sum, span);
  return known;
}

// False if nothing was sent: the item's weights have not arrived.
template <bool kGrowing>
EPRT_DEVICE bool send_part(const CombineParams& p, const Call& call, Item& item, int part, int lane) {
  const Context& c = p.context;
  const uint32_t epoch = call.epoch;
  bool sent = true;
  if (kExact) {
    for (uint32_t left = __ballot_sync(kAllLanes, item.row >= 0); left; left &= left - 1) {
      const int k = __ffs(left) - 1;
      send_expert_row<kGrowing>(p, epoch, item.owner, item.token, k, __shfl_sync(kAllLanes, item.row, k), part, lane);
    }
  } else {
    sent = send_sum<kGrowing>(p, call, item, part, lane);
  }
  __syncwarp();
  if (kExact && item.row >= 0) store_release_sys(flag_at(c, item.owner, epoch, item.token, lane, part), epoch);
  return sent;
}

// Flags of the sums that a warp has stored, not raised yet; lane n keeps the n-th. A release waits some microseconds
// until the stores have reached the owner, so one wait serves several flags.
struct Flags {
  uint32_t* flag = nullptr;
  int count = 0;

  EPRT_DEVICE void raise(uint32_t epoch) {
    __syncwarp();  // orders the warp's stores before the releases (cumulativity)
    if (flag) store_release_sys(flag, epoch);
    flag = nullptr, count = 0;
  }
  EPRT_DEVICE void add(uint32_t* next, uint32_t epoch, int lane) {
    if (lane == count) flag = next;
    if (++count == kFlagBatch) raise(epoch);
  }
};

// Tells all ranks that this combine has begun. A rank that has heard so from all knows that they have finished the
// combine B calls earlier, so that its buffers may be written again.
EPRT_DEVICE void tell_begun(const Context& c, const Call& call) {
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < kRanks && !((call.masked >> threadIdx.x) & 1))
    store_relaxed(begun_at(c, threadIdx.x, c.rank), call.epoch);
}

// The items of this rank, owner by owner. Lane i stands for the i-th rank after this one, so that ranks do not all send
// to rank 0 first.
struct Items {
  int source, begin, end;  // the lane's owner; its items are begin..end in the order of sending
  int count;               // of all owners

  EPRT_DEVICE Items(const Context& c, int of_source, uint32_t masked, int lane) : source((c.rank + 1 + lane) % kRanks) {
    const int own = lane < kRanks && !((masked >> source) & 1) ? of_source : 0;
    end = own;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int below = __shfl_up_sync(kAllLanes, end, step);
      if (lane >= step) end += below;
    }
    begin = end - own;
    count = __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  EPRT_DEVICE Item load(const CombineParams& p, int n, int lane) const {
    const int owner_lane = __ffs(__ballot_sync(kAllLanes, n < end)) - 1;
    const int owner = __shfl_sync(kAllLanes, source, owner_lane);
    return load_item(p, owner, n - __shfl_sync(kAllLanes, begin, owner_lane), lane);
  }
};

EPRT_DEVICE void send(const CombineParams& p, WaitBook* book, const Call& call, const Items& items, int lane) {
  const Context& c = p.context;
  const uint32_t epoch = call.epoch;
  const int num_units = items.count * kRowParts, stride = gridDim.x * kWarps;
  // Owners whose tokens are still to be sent: first all, then those whose weights were late.
  uint32_t owners = kAllLanes;
  bool again = false;
  do {
    uint32_t late = 0;
    Flags flags;
    int unit = blockIdx.x + (threadIdx.x / kWarp) * gridDim.x;
    Item next = unit < num_units ? items.load(p, unit / kRowParts, lane) : Item{};
    for (; unit < num_units; unit += stride) {
      Item item = next;
      if (unit + stride < num_units) next = items.load(p, (unit + stride) / kRowParts, lane);  // overlaps the send
      const uint32_t owner = 1u << item.owner;
      if (kLateWeights && (!(owners & owner) || late & owner)) continue;
      const int part = unit % kRowParts;
      if ((!again || wait_weights(p, call, item, lane)) && send_part<false>(p, call, item, part, lane)) {
        if (!kExact) flags.add(flag_at(c, item.owner, epoch, item.token, item.combine_row, part), epoch, lane);
      } else {
        late |= owner;
      }
    }
    flags.raise(epoch);
    owners = kLateWeights && late ? still_late(c, book, call.begin_ns, epoch, late, lane) : 0;
    again = true;
  } while (owners);
}

// ---- send tile by tile, while the experts still compute -------------------------------------------------------------

// Waits until the tile's counter has reached the threshold; the same result in all lanes. False at the deadline: the
// tile's rows are not sent, and the warp no longer waits for later tiles, only looks at them. So a launch ends however
// many tiles never become ready.
EPRT_DEVICE bool wait_tile(const CombineParams& p, int e, int m, bool& patient, int lane) {
  const Context& c = p.context;
  const int tile = e * p.slot_tiles + m;
  if (m >= p.slot_tiles) {  // the slot has more rows than its counters cover
    report(c.deadline.failure, kSignal, tile, 0, p.threshold);
    return false;
  }
  const uint64_t start = global_timer_ns();
  for (;;) {
    const uint32_t seen = load_acquire_sys(p.signal + tile);
    if (__all_sync(kAllLanes, seen >= p.threshold)) return true;
    if (!patient) return false;
    if (__any_sync(kAllLanes, global_timer_ns() - start > c.deadline.timeout_ns)) {
      if (lane == 0) report(c.deadline.failure, kSignal, tile, seen, p.threshold);
      return patient = false;
    }
  }
}

// Whether the row belongs to this item. It does not if a rank was lost in the middle of a dispatch: `row_item` of a row
// that never arrived is left over from an earlier dispatch. An item that did arrive names exactly its rows.
EPRT_DEVICE bool owns_row(const CombineParams& p, int item_index, int owner, int row, int lane) {
  const bool there = item_index % p.context.max_tokens < p.handle.source_items[owner];
  return __any_sync(kAllLanes, there && lane < kTopk && p.handle.item_row[int64_t(item_index) * kTopk + lane] == row);
}

// EXACT: sends the row itself. Otherwise the warp that finds the token's last row ready sends the token's sum.
EPRT_DEVICE void send_row(const CombineParams& p, const Call& call, int row, int lane) {
  const Context& c = p.context;
  const uint32_t epoch = call.epoch;
  const int item_index = p.handle.row_item[row], owner = item_index / c.max_tokens;
  if (__any_sync(kAllLanes, load_relaxed(c.deadline.mask + owner))) return;
  if (call.masked && !owns_row(p, item_index, owner, row, lane)) return;
  if (!kExact) {
    int left = 0;
    if (lane == 0) left = fetch_add_acq_rel(p.handle.item_left + item_index, -1);
    if (__shfl_sync(kAllLanes, left, 0) != 1) return;
    __syncwarp();  // orders lane 0's acquire before the loads of all lanes
  }
  Item item = load_item(p, owner, item_index % c.max_tokens, lane);
  const uint32_t wanted = __ballot_sync(kAllLanes, item.row >= 0);
  if (kExact && item.row != row) item.row = -1;
  if (!kExact && lane == 0)  // reset for another combine of the same dispatch
    p.handle.item_left[item_index] = __popc(wanted);
  for (int part = 0; part < kRowParts; ++part) send_part<true>(p, call, item, part, lane);
  if (kExact) return;
  __syncwarp();  // orders the warp's stores before the releases (cumulativity)
  for (int part = lane; part < kRowParts; part += kWarp)
    store_release_sys(flag_at(c, owner, epoch, item.token, item.combine_row, part), epoch);
}

EPRT_DEVICE void send_tiles(const CombineParams& p, const Call& call, int lane) {
  const Context& c = p.context;
  const int warp = threadIdx.x / kWarp;
  bool patient = true;
  int next = 0;  // counts the tiles that hold rows, over all slots; this block takes every gridDim-th one
  for (int e = 0; e < c.num_slots; ++e) {
    const int begin = p.handle.slot_begin[e], rows = p.slot_rows[e];
    for (int m = 0; m * p.block_m < rows; ++m, ++next) {
      if (next % int(gridDim.x) != int(blockIdx.x)) continue;
      if (!wait_tile(p, e, m, patient, lane)) continue;
      for (int row = m * p.block_m + warp; row < min(rows, (m + 1) * p.block_m); row += kWarps)
        send_row(p, call, begin + row, lane);
    }
  }
}

// ---- receive --------------------------------------------------------------------------------------------------------

// Lane r: the combine row of the token that rank r fills. holder: lane k: the rank of entry k, or -1.
EPRT_DEVICE int row_of_rank(int holder, int lane) {
  if (kRowIsRank) return lane;
  int row = 0;
#pragma unroll
  for (int k = kTopk - 1; k >= 0; --k)
    if (__shfl_sync(kAllLanes, holder, k) == lane) row = k;
  return row;
}

// One warp sums one part of one token, in order of rank (EXACT: of k). A masked rank's row adds nothing. slot: lane k:
// entry k.
EPRT_DEVICE void sum_token(const CombineParams& p, WaitBook* book, const Call& call, int token, int slot, int part,
                           int lane) {
  const Context& c = p.context;
  const uint32_t epoch = call.epoch;
  const int holder = slot >= 0 ? slot / c.num_slots : -1;
  const uint32_t ranks = __reduce_or_sync(kAllLanes, holder >= 0 ? 1u << holder : 0u) & ~call.masked;
  // EXACT: lane k waits for row k. Else lane r waits for rank r's row.
  const int peer = kExact ? holder : lane;
  const bool wanted = kExact ? slot >= 0 && (ranks >> holder) & 1 : (ranks >> lane) & 1;
  const int my_row = kExact ? lane : row_of_rank(holder, lane);
  const float my_weight = kExact && lane < kTopk ? p.topk_weight[token * kTopk + lane] : 1.f;
  const bool there =
      wanted && wait_peer(c, book, flag_at(c, c.rank, epoch, token, my_row, part), epoch, kCombineRows, peer);
  const uint32_t rows = __ballot_sync(kAllLanes, there);
  __syncwarp();  // orders each lane's acquire before the loads of all lanes
  const Span span = span_of(part, lane);
  const Sum sum = sum_rows<true>(
      rows, span, [&](int b) { return row_at(c, c.rank, epoch, token, __shfl_sync(kAllLanes, my_row, b)); },
      [&](int b) { return __shfl_sync(kAllLanes, my_weight, b); }, [] {});
  store_sum(p.out + int64_t(token) * kRowVectors * 16, sum, span);
}

// Waits until every rank that is not masked has begun this combine. One warp does so before the launch ends: the last
// one, which has the least work.
EPRT_DEVICE void wait_begun(const CombineParams& p, WaitBook* book, const Call& call, int lane) {
  const Context& c = p.context;
  if (blockIdx.x != 0 || threadIdx.x < kThreads - kWarp || lane >= kRanks || (call.masked >> lane) & 1) return;
  const uint32_t* begun = begun_at(c, c.rank, lane);
  if (int32_t(load_acquire_sys(begun) - call.epoch) < 0)
    wait_peer<true>(c, book, begun, call.epoch, kCombineRows, lane);
}

// The lane's entry of the unit's token.
EPRT_DEVICE OwnSlot load_slot(const CombineParams& p, int unit, int lane) {
  OwnSlot slot;
  if (p.num_tokens) slot.load(p, min(unit / kRowParts, p.num_tokens - 1) * kTopk + min(lane, kTopk - 1));
  return slot;
}

// next: the entry of this warp's first unit.
EPRT_DEVICE void receive(const CombineParams& p, WaitBook* book, const Call& call, OwnSlot next, int lane) {
  const Context& c = p.context;
  if (lane == 0) begin_waiting(book);
  const int num_units = p.num_tokens * kRowParts, stride = gridDim.x * kWarps;
  for (int unit = blockIdx.x + (threadIdx.x / kWarp) * gridDim.x; unit < num_units; unit += stride) {
    const int slot = lane < kTopk ? next.value(p) : -1;
    next = load_slot(p, unit + stride, lane);
    sum_token(p, book, call, unit / kRowParts, slot, unit % kRowParts, lane);
  }
  wait_begun(p, book, call, lane);
  if (PROFILE || blockIdx.x == 0) __syncthreads();
  stamp(c, 8);
  close_book(c, book, 1, p.wait_cost);
}

__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ CombineParams p) {
  __shared__ uint32_t epoch_shared;  // the handle's epoch may not be written yet: block 0 writes it
  __shared__ WaitBook book;
  const Context& c = p.context;
  const int lane = threadIdx.x % kWarp, warp_unit = int(blockIdx.x) + int(threadIdx.x / kWarp) * int(gridDim.x);
  const bool sends = p.phases & kSend, receives = p.phases & kRecv;
  stamp(c, 0);
  const uint64_t begin_ns = global_timer_ns();
  open_book(&book, blockIdx.x == 0, false);
  // Issue all loads of global memory at once: items, own routing, weights, epoch and mask.
  const int of_source = p.handle.source_items[(c.rank + 1 + lane) % kRanks];
  OwnSlot own_slot;
  if (receives) own_slot = load_slot(p, warp_unit, lane);
  const WeightUnits weights(p);
  WeightPair pair;
  if (kLateWeights) pair = load_weights(p, weights, warp_unit, lane);
  if (kStats && sends && blockIdx.x == 0 && threadIdx.x == kThreads - 1)
    add_to_total(c.stats.compute_ns, int64_t(begin_ns - *p.handle.received_ns));
  if (threadIdx.x == 0) epoch_shared = sends ? next_epoch(c, p.handle, 1) : p.handle.epoch[1];
  const uint32_t masked = masked_ranks(c.deadline, lane);
  __syncthreads();
  const Call call{begin_ns, epoch_shared, masked};
  if (kLateWeights) send_weights(p, weights, call.epoch, masked, pair, warp_unit, lane);
  if (sends) {
    tell_begun(c, call);
    if (p.signal)
      send_tiles(p, call, lane);
    else
      send(p, &book, call, Items(c, of_source, masked, lane), lane);
    stamp(c, 4);
  }
  if (receives) receive(p, &book, call, own_slot, lane);
}

}  // namespace eprt::low_latency
