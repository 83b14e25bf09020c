// Low-latency combine. Send: the rank that ran the experts computes the weighted fp32 sum of its rows of a token and
// sends one bf16 row per token and rank to the token's owner (EXACT: one row per expert, unweighted). Receive: the
// owner sums these rows. A row travels in lines, so that the owner sums while
// others still send. LATE_WEIGHTS: dispatch was not told the weights; owners send them first, and the experts' ranks
// wait for them.
#include "low_latency_combine_weights.cuh"
#include "low_latency_node_sum.cuh"

namespace eprt::low_latency {

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

// False if the item's weights have not arrived.
EPRT_DEVICE bool wait_weights(const CombineParams& p, const Call& call, Item& item, int lane) {
  if (!kLateWeights) return true;
  const Context& c = p.context;
  const uint64_t* words = weights_at(c, c.rank, call.epoch, item.owner) + item.token * kTopk;
  return wait_weights(call.begin_ns, call.epoch, words + lane, item.late, item.row >= 0);
}

#ifdef NODE_RANKS
// LAYERED: whether the owner's node has its sum of this node's rows from a rank here, and from which.
EPRT_DEVICE bool is_handed(const Context& c, const Item& item) { return kLayered && is_beyond(c, item.owner); }
EPRT_DEVICE int hander_of(const Item& item) { return item.combine_row >> kHanderShift; }
#endif

// Where an item's row of this number goes.
EPRT_DEVICE uint8_t* place_of_row(const Context& c, uint32_t epoch, const Item& item, int number) {
  EPRT_WIRED(if (is_handed(c, item)) return share_at(c, hander_of(item), epoch, item.owner, item.token, number);)
  return row_at(c, item.owner, epoch, item.token, number);
}

EPRT_DEVICE const uint8_t* output_row(const CombineParams& p, int row) { return p.y + int64_t(row) * kRowVectors * 16; }

// Sends one part of an expert's row unchanged. kGrowing: the experts still compute other rows.
template <bool kGrowing>
EPRT_DEVICE void send_expert_row(const CombineParams& p, uint32_t epoch, const Item& item, int k, int row, int part,
                                 int lane) {
  Part values = {};
  load_part<kGrowing>(values, output_row(p, row), part, lane);
  send_lines(place_of_row(p.context, epoch, item, k), values, part, epoch, lane);
}

// Sends one part of a token's sum over this rank's experts; false if its weights have not arrived.
template <bool kGrowing>
EPRT_DEVICE bool send_sum(const CombineParams& p, const Call& call, Item& item, int part, int lane) {
  const uint32_t wanted = __ballot_sync(kAllLanes, item.row >= 0);
  bool known = true;
  const Sum sum = sum_rows<kGrowing>(
      wanted, part, lane, [&](int k) { return output_row(p, __shfl_sync(kAllLanes, item.row, k)); },
      [&](int k) { return __shfl_sync(kAllLanes, kLateWeights ? item.late.value() : item.weight, k); },
      [&] { known = wait_weights(p, call, item, lane); });
  if (!known) return false;
  Part rounded;
  round_sum(rounded, sum);
  const int number = item.combine_row EPRT_WIRED(% (1 << kHanderShift));
  send_lines(place_of_row(p.context, call.epoch, item, number), rounded, part, call.epoch, lane);
  return true;
}

// False if nothing was sent: the item's weights have not arrived.
template <bool kGrowing>
EPRT_DEVICE bool send_part(const CombineParams& p, const Call& call, Item& item, int part, int lane) {
  EPRT_WIRED(if (is_handed(p.context, item) && (call.masked >> hander_of(item)) & 1) return true;)
  if (!kExact) return send_sum<kGrowing>(p, call, item, part, lane);
  for (uint32_t left = __ballot_sync(kAllLanes, item.row >= 0); left; left &= left - 1) {
    const int k = __ffs(left) - 1, row = __shfl_sync(kAllLanes, item.row, k);
    send_expert_row<kGrowing>(p, call.epoch, item, k, row, part, lane);
  }
  return true;
}

#ifdef NODE_RANKS
// All parts of an item's rows are written.
EPRT_DEVICE void ship_item(const Context& c, const Item& item, uint32_t epoch) {
  if (kLayered || !is_beyond(c, item.owner)) return;
  if (!kExact) return ship_row(c, item.owner, epoch, item.token, item.combine_row);
  for (uint32_t left = __ballot_sync(kAllLanes, item.row >= 0); left; left &= left - 1)
    ship_row(c, item.owner, epoch, item.token, __ffs(left) - 1);
}

EPRT_DEVICE void ship_if_complete(const Context& c, const Item& item, uint32_t epoch, int lane) {
  if (!kLayered && is_beyond(c, item.owner) && completes_rows(c, item.owner, epoch, item.token, lane))
    ship_item(c, item, epoch);
}
#endif

// Tells all ranks that this combine has begun. A rank that has heard so from all knows that they have finished the
// combine B calls earlier, so that its buffers may be written again.
EPRT_DEVICE void tell_begun(const Context& c, const Call& call) {
  EPRT_WIRED(const int r = threadIdx.x;
             if (blockIdx.x == gridDim.x - 1 && r < kRanks && is_beyond(c, r) &&
                 !((call.masked >> r) & 1)) return eprt_wire_post(begun_word(c, call.epoch, c.rank), call.epoch, r);)
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < kRanks && !((call.masked >> threadIdx.x) & 1))
    store_relaxed(begun_at(c, threadIdx.x, c.rank), call.epoch);
}

// The items of this rank: those of other owners in turns, then its own, so that the links are busy first, and all of
// them. Lane r stands for rank r.
struct Items {
  int own, rank;  // tokens of the lane's owner; this rank
  int others;     // before the first of this rank's own: as many for each other rank as the rank with the most has
  int count;      // including those that there are not

  static constexpr int kOthers = kRanks > 1 ? kRanks - 1 : 1;

  EPRT_DEVICE Items(const Context& c, int of_source, uint32_t masked, int lane)
      : own(lane < kRanks && !((masked >> lane) & 1) ? of_source : 0), rank(c.rank) {
    others = __reduce_max_sync(kAllLanes, lane == rank ? 0 : own) * (kRanks - 1);
    count = others + __shfl_sync(kAllLanes, own, rank);
  }
  EPRT_DEVICE static int owner_before(const Context& c, int n) { return (c.rank + 1 + n % kOthers) % kRanks; }
  // Item n, before it is known how many there are; good if holds_guess.
  EPRT_DEVICE static Item guess(const CombineParams& p, int n, int lane) {
    return load_item(p, owner_before(p.context, n), min(n / kOthers, p.context.max_tokens - 1), lane);
  }
  EPRT_DEVICE bool holds_guess(const Item& guess, int n) const {
    return n < others && n / kOthers < __shfl_sync(kAllLanes, own, guess.owner);
  }
  EPRT_DEVICE Item load(const CombineParams& p, int n, int lane) const {
    const bool is_own = n >= others;
    const int owner = is_own ? rank : owner_before(p.context, n), position = is_own ? n - others : n / kOthers;
    if (position >= __shfl_sync(kAllLanes, own, owner)) return Item{-1, 0, 0, -1, 0.f, {}};
    return load_item(p, owner, position, lane);
  }
};

// guess: of the item of this warp's first unit.
EPRT_DEVICE void send(const CombineParams& p, WaitBook* book, const Call& call, const Items& items, const Item& guess,
                      int lane) {
  const Context& c = p.context;
  const uint32_t epoch = call.epoch;
  const int num_units = items.count * kRowParts, stride = gridDim.x * kWarps;
  // Owners whose tokens are still to be sent: first all, then those whose weights were late.
  uint32_t owners = kAllLanes;
  bool again = false;
  do {
    uint32_t late = 0;
    int unit = blockIdx.x + (threadIdx.x / kWarp) * gridDim.x;
    Item next = guess;
    if (again || !items.holds_guess(guess, unit / kRowParts))
      next = unit < num_units ? items.load(p, unit / kRowParts, lane) : Item{};
    for (; unit < num_units; unit += stride) {
      Item item = next;
      if (unit + stride < num_units) next = items.load(p, (unit + stride) / kRowParts, lane);  // overlaps the send
      if (item.owner < 0) continue;
      const uint32_t owner = 1u << item.owner;
      if (kLateWeights && (!(owners & owner) || late & owner)) continue;
      const bool known = !again || wait_weights(p, call, item, lane);
      if (!known || !send_part<false>(p, call, item, unit % kRowParts, lane)) late |= owner;
      EPRT_WIRED(ship_if_complete(c, item, epoch, lane);)
    }
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
  EPRT_WIRED(ship_item(c, item, call.epoch);)
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

// One warp sums one part of one token, in order of rank (EXACT: of k). A masked rank's row adds nothing. slot: lane k:
// entry k.
EPRT_DEVICE void sum_token(const CombineParams& p, WaitBook* book, const Call& call, int token, int slot, int part,
                           int lane) {
  const Context& c = p.context;
  EPRT_WIRED(if (kLayered) return sum_nodes(p, book, call, token, slot, part, lane);)
  const int holder = slot >= 0 ? rank_of(slot, c.num_slots) : -1;
  const uint32_t ranks = __reduce_or_sync(kAllLanes, holder >= 0 ? 1u << holder : 0u) & ~call.masked;
  // EXACT: bit k stands for row k. Else bit r stands for rank r's row.
  uint32_t left = kExact ? __ballot_sync(kAllLanes, holder >= 0 && (ranks >> max(holder, 0)) & 1) : ranks;
  const int my_peer = kExact ? holder : lane, my_row = kExact ? lane : row_of_rank(holder, lane);
  const float my_weight = kExact && lane < kTopk ? p.topk_weight[token * kTopk + lane] : 1.f;
  Sum sum = {};
  while (left) {
    AwaitedRows held;
#pragma unroll
    for (int i = 0; i < kAwaitedRows; ++i) {
      const int b = left ? __ffs(left) - 1 : 0;
      if (left) held.rows |= 1u << i;
      left &= left - 1;
      held.peer[i] = __shfl_sync(kAllLanes, my_peer, b);
      held.weight[i] = __shfl_sync(kAllLanes, my_weight, b);
      held.row[i] = row_at(c, c.rank, call.epoch, token, __shfl_sync(kAllLanes, my_row, b));
      EPRT_WIRED(held.number[i] = __shfl_sync(kAllLanes, my_row, b);)
    }
    EPRT_WIRED(held.await_words(c, book, call.epoch, token, lane);)
    held.wait(c, book, part, call.epoch, lane);
#pragma unroll
    for (int i = 0; i < kAwaitedRows; ++i)
      if ((held.rows >> i) & 1) add_weighted(sum, held.v + i * kPartFours, held.weight[i]);
  }
  store_sum(p.out + int64_t(token) * kRowVectors * 16, sum, part, lane);
}

// Waits until every rank that is not masked has begun this combine. One warp does so before the launch ends: the last
// one, which has the least work.
EPRT_DEVICE void wait_begun(const CombineParams& p, WaitBook* book, const Call& call, int lane) {
  const Context& c = p.context;
  if (blockIdx.x != 0 || threadIdx.x < kThreads - kWarp || lane >= kRanks || (call.masked >> lane) & 1) return;
  const uint32_t* begun = begun_at(c, c.rank, lane);
  EPRT_WIRED(if (is_beyond(c, lane)) begun = epoch_of(begun_word(c, call.epoch, lane));)
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
  EPRT_WIRED(if (kLayered) sum_for_others(c, book, call, lane);)
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
  const int of_source = p.handle.source_items[lane % kRanks];
  Item guess{};
  if (sends && !p.signal) guess = Items::guess(p, warp_unit / kRowParts, lane);
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
  const Call call{begin_ns, epoch_shared, masked EPRT_WIRED(, p.handle.epoch[0])};
  if (kLateWeights) send_weights(p, weights, call.epoch, masked, pair, warp_unit, lane);
  if (sends) {
    tell_begun(c, call);
    if (p.signal)
      send_tiles(p, call, lane);
    else
      send(p, &book, call, Items(c, of_source, masked, lane), guess, lane);
    stamp(c, 4);
  }
  if (receives) receive(p, &book, call, own_slot, lane);
}

}  // namespace eprt::low_latency
