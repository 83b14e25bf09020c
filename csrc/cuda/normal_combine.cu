// Normal-mode combine. Send: the rank that ran the experts returns each item to its owner as one bf16 row, the weighted
// fp32 sum of the item's rows (kExact: each row separately; not kGrouped: its only row, as it is). Receive: the owner
// sums the rows of a token as they arrive, and in a launch of both phases what its own experts computed, where that
// lies. For kGrouped, kExact and items see normal.cuh.
// Bulk copies bring rows to shared memory, from which they are summed in registers. Rows leave the SM by bulk copies
// too, because a warp can wait for its own copies; plain stores would need a fence, which waits for those of all warps.
#include "normal_call.cuh"
#include "sums.cuh"

namespace eprt::normal {

constexpr int kWarpBytes = 14336;  // shared memory of a warp; equal to COMBINE_WARP_BYTES in normal_grid.py
constexpr int kRowSlots = 2;       // pieces of a warp that sends rows unchanged: one arrives while the other leaves
constexpr int kSumSlots = kWarpBytes / kSumBytes;  // pieces of a warp that sums
constexpr int kOutSlots = 1;                       // if it sends its sums: pieces for sums on their way out
constexpr int kFeedSlots = kSumSlots - kOutSlots;  // and for rows on their way in

constexpr int kBiases = 2;
static_assert(kRanks + kBiases <= kWarp, "a lane stands for a rank, or a bias");

struct CombineParams {
  Context context;
  Layout layout;
  const uint8_t* y;              // bf16 [rows, H]
  const float* y_weight;         // [items, K], sent with the rows; or null
  const int32_t* item_row;       // [items, K]: rows or -1; null: an item is one row, without weight
  const float* item_weight;      // [items, K]: gate weights
  const int32_t* item_token;     // [items]: index of the item's token on its source; EXACT only
  const void* topk_slot;         // the owner's own [T, K]; EXACT only
  const float* topk_weight;      // the owner's own [T, K]; EXACT only
  const uint8_t* bias[kBiases];  // bf16 [T, H], or null
  uint8_t* out;                  // bf16 [T, H]
  float* out_weight;             // [T, K], with y_weight
  uint64_t block;                // this rank's block of returned rows: offset in the heap, a multiple of 128
  int32_t capacity;              // items that dispatch had room for; the others are left out here too
  int32_t num_tokens;            // T
  int32_t top_k;                 // K
  int32_t num_slots;             // S
  int32_t slot_bytes;            // of one topk_slot
  int32_t row_bytes;             // 2 H
  int32_t stride;                // of returned rows: row_bytes, plus the weights if they are sent
  int32_t phases;                // Phases
  int32_t piece_bytes;           // bytes of an unchanged row that pass through shared memory at once; a multiple of 512
  Division division;
};

struct SharedCombine {
  Call call;
  uint64_t full[kWarps][2][kSumSlots];  // of a warp's ring for sending, for receiving
};

// Whether what this rank's own experts computed stays in y, where the receiving warps read it: y is the caller's again
// when a launch has sent it.
EPRT_DEVICE bool own_in_place(const CombineParams& p) { return p.phases == (kSend | kRecv); }

static_assert(kRowSlots <= kSumSlots && kOutSlots < kSumSlots);

// ---- send -----------------------------------------------------------------------------------------------------------

struct Owner {                // lane r: rank r
  int first_item, num_items;  // its items among those that this rank received
  Place place;                // number: our first item among its returned rows
};

// By expert. Lane r: where rank r expects the outputs that this rank returns. Blocks lie at the same offset on all
// ranks, so our own offset is theirs; the counts say which returned row is our first.
EPRT_DEVICE Place place_at_owner(const CombineParams& p, int lane) {
  const Context& c = p.context;
  Place place{uint32_t(p.block / 128), 0, lane < kRanks && !load_relaxed(c.deadline.mask + lane)};
  for (int r = 0; place.known && r < c.rank; ++r) place.number += p.layout.sent[lane * kRanks + r];
  return place;
}

EPRT_DEVICE Owner find_owner(const CombineParams& p, SharedCombine* shared, int lane) {
  const Context& c = p.context;
  const int count = lane < kRanks ? p.layout.sent[lane * kRanks + c.rank] : 0;
  const int first = sum_below(count, lane);
  Owner owner{first, min(count, max(0, p.capacity - first)), {}};
  owner.place = kGrouped ? place_at_owner(p, lane)
                         : wait_place(c, &shared->call.book, c.heap.combine_place, shared->call.epoch, kCombinePlace,
                                      lane, owner.num_items > 0);
  if (!owner.place.known) owner.num_items = 0;
  return owner;
}

struct Item {
  int owner = -1;    // -1: no item
  int64_t number;    // of the item, among those that this rank received (not of the turn)
  int returned;      // among its owner's returned rows
  int row = -1;      // lane k: of entry k, or -1; one row per item: lane 0
  float weight = 0;  // lane k
};

// The items that this rank returns, in the order in which warps take them. Owners take turns, starting after this rank,
// so that ranks do not all send to rank 0 first, and this rank, if its rows do not stay in place, comes last.
struct Items {
  const CombineParams& p;
  const Owner& owners;
  int lane;
  int turns;  // owners that take turns
  int end;    // turns are numbered below end; owners with fewer items than others leave some turns without an item

  EPRT_DEVICE Items(const CombineParams& p, const Owner& owners, int lane)
      : p(p), owners(owners), lane(lane), turns(own_in_place(p) ? kRanks - 1 : kRanks) {
    const bool stays = own_in_place(p) && lane == p.context.rank;
    end = turns * __reduce_max_sync(kAllLanes, stays ? 0 : owners.num_items);
  }

  EPRT_DEVICE Item operator[](int number) const {
    if (number >= end) return {};
    const int owner = (p.context.rank + 1 + number % turns) % kRanks, position = number / turns;
    if (position >= __shfl_sync(kAllLanes, owners.num_items, owner)) return {};
    Item item{owner};
    item.number = __shfl_sync(kAllLanes, owners.first_item, owner) + position;
    item.returned = int(__shfl_sync(kAllLanes, owners.place.number, owner)) + position;
    if (!kGrouped && lane == 0) item.row = item.number;
    if (kGrouped && lane < p.top_k) {
      item.row = p.item_row[item.number * p.top_k + lane];
      item.weight = p.item_weight[item.number * p.top_k + lane];
    }
    return item;
  }
};

// A warp that sends.
struct Sender {
  const CombineParams& p;
  const Owner& owners;
  uint32_t epoch;
  uint8_t* slots;  // [kWarpBytes] of shared memory
  uint64_t* full;  // barriers of the slots
  int lane;
  Flags late;

  EPRT_DEVICE uint8_t* block_of(const Item& item) const {  // the owner's block of returned rows
    return p.context.peer[item.owner] + uint64_t(__shfl_sync(kAllLanes, owners.place.start, item.owner)) * 128;
  }

  EPRT_DEVICE uint8_t* returned_row(const Item& item, int k) const {
    const int64_t row = kExact ? int64_t(p.item_token[item.number]) * p.top_k + k : item.returned;
    return block_of(item) + row * p.stride;
  }

  // Called when the item's copies are committed, to have its flag raised. groups: how many bulk-copy groups they form.
  EPRT_DEVICE void sent(const Item& item, int groups) {
    const Context& c = p.context;
    uint32_t* flag =
        lane == 0 && item.owner >= 0 ? flag_at(c, c.heap.returned, item.owner, epoch, item.returned) : nullptr;
    late.add(flag, groups, lane);
  }

  EPRT_DEVICE int bytes_of(int piece) const { return min(p.piece_bytes, p.row_bytes - piece * p.piece_bytes); }

  // Sends rows unchanged: with one row per item that row, EXACT all rows of the item.
  EPRT_DEVICE void send_rows(const Items& items, Turns turns) {
    const int pieces = ceil_div(p.row_bytes, p.piece_bytes);
    Ring<kRowSlots> ring(slots, full, p.piece_bytes, lane);
    Item ahead = items[turns.number[0]];
    uint32_t rows_ahead = __ballot_sync(kAllLanes, ahead.row >= 0);
    int turn_ahead = 0, piece_ahead = 0, held = 0;
    const auto load_ahead = [&] {
      while (held < kRowSlots) {
        if (!rows_ahead) {
          if (turn_ahead == Turns::kKnown - 1) return;
          ahead = items[turns.after(++turn_ahead)];
          rows_ahead = __ballot_sync(kAllLanes, ahead.row >= 0);
          continue;
        }
        const int64_t row = __shfl_sync(kAllLanes, ahead.row, __ffs(rows_ahead) - 1);
        ring.load(p.y + row * p.row_bytes + piece_ahead * p.piece_bytes, bytes_of(piece_ahead), lane);
        ++held;
        if (++piece_ahead == pieces) piece_ahead = 0, rows_ahead &= rows_ahead - 1;
      }
    };
    load_ahead();
    for (; turns.number[0] < items.end; turns.step(lane), --turn_ahead, load_ahead()) {
      const Item item = items[turns.number[0]];
      int groups = 0;
      for (uint32_t rows = __ballot_sync(kAllLanes, item.row >= 0); rows; rows &= rows - 1) {
        uint8_t* to = returned_row(item, __ffs(rows) - 1);
        for (int piece = 0; piece < pieces; ++piece, ++groups) {
          store_piece(lane == 0 ? to + piece * p.piece_bytes : nullptr, ring.take(), bytes_of(piece), lane);
          bulk_wait_read<0>();  // then the slot may be written again
          __syncwarp();
          --held;
          load_ahead();
        }
        if (p.y_weight && lane < p.top_k)
          reinterpret_cast<float*>(to + p.row_bytes)[lane] = p.y_weight[item.number * p.top_k + lane];
      }
      sent(item, groups);
    }
  }

  EPRT_DEVICE Summands summands_of(const Item& item) const {
    return {p.y + int64_t(item.row) * p.row_bytes, item.weight, __ballot_sync(kAllLanes, item.row >= 0)};
  }

  // Sends the weighted sum of an item's rows.
  template <class Refill>
  EPRT_DEVICE void send_sum(const Item& item, const Summands& rows, Feed<kFeedSlots>& feed, Refill refill) {
    uint8_t* to = returned_row(item, 0);
    for (int at = 0, i = 0; at < p.row_bytes; at += kSumBytes, ++i) {
      float sum[kSumSteps][8] = {};
      sum_piece<true>(sum, feed, rows.lanes, rows.weight, lane, refill);
      const int bytes = min(kSumBytes, p.row_bytes - at);
      uint8_t* slot = slots + i % kOutSlots * kSumBytes;
      bulk_wait_read<kOutSlots - 1>();  // until the slot's earlier content has left
      __syncwarp();
      put_piece(slot, sum, bytes, lane);
      bulk_fence_shared();
      __syncwarp();
      store_piece(lane == 0 ? to + at : nullptr, slot, bytes, lane);
    }
  }

  // Sends sums; while an item's rows are summed, the next item's rows arrive.
  EPRT_DEVICE void send_sums(const Items& items, Turns turns) {
    Feed<kFeedSlots> feed(slots + kOutSlots * kSumBytes, full, p.row_bytes, lane);
    Item item = items[turns.number[0]];
    Summands rows = summands_of(item);
    feed.begin({rows});
    for (; turns.number[0] < items.end; turns.step(lane)) {
      const Item next = items[turns.number[1]];
      bool begun = false;  // whether the next item's rows are being loaded
      const auto refill = [&] {
        if (feed.done() && !begun) feed.begin({summands_of(next)}), begun = true;
        feed.load(lane);
      };
      refill();
      if (item.owner >= 0) send_sum(item, rows, feed, refill);
      sent(item, item.owner >= 0 ? ceil_div(p.row_bytes, kSumBytes) : 0);
      item = next;
      rows = summands_of(item);
    }
  }
};

EPRT_DEVICE void send(const CombineParams& p, SharedCombine* shared, uint8_t* slots, int lane) {
  const Share share = share_of(p.division, p.phases, kSend);
  if (!share.takes_part) return;
  const int warp = threadIdx.x / kWarp;
  const Owner owners = find_owner(p, shared, lane);
  const Items items(p, owners, lane);
  const Turns turns(p.context, kCombine, kSend, shared->call.epoch, share, lane);
  Sender sender{p, owners, shared->call.epoch, slots, shared->full[warp][0], lane, {{shared->call.desk + warp}}};
  if constexpr (kGrouped && !kExact)
    sender.send_sums(items, turns);
  else
    sender.send_rows(items, turns);
  sender.late.close(lane);
}

// ---- receive --------------------------------------------------------------------------------------------------------

// Bit k: whether the row of the token's entry k has arrived. ranks: bit r says that rank r's item has. Rows for which
// there was no room never arrive.
EPRT_DEVICE uint32_t came_by_entry(const CombineParams& p, int64_t token, uint32_t ranks, int lane) {
  int slot = -1, index = -1;
  if (lane < p.top_k) {
    slot = read_index(p.topk_slot, p.slot_bytes, token * p.top_k + lane, p.num_slots);
    index = p.layout.slot_index[token * p.top_k + lane];
  }
  return __ballot_sync(kAllLanes, slot >= 0 && index >= 0 && (ranks >> (slot / (p.num_slots / kRanks))) & 1);
}

struct Returned {  // lane r: what rank r returns
  int first;       // its first row among the returned rows, which are in order of rank
  int own_first;   // this rank's first own item among those that it received
};

EPRT_DEVICE Returned find_returned(const CombineParams& p, int lane) {
  const int rank = p.context.rank;
  const int sent = lane < kRanks ? p.layout.sent[rank * kRanks + lane] : 0;
  const int received = lane < kRanks ? p.layout.sent[lane * kRanks + rank] : 0;
  return {sum_below(sent, lane), __shfl_sync(kAllLanes, sum_below(received, lane), rank)};
}

// A token whose rows are summed. position: lane r: its index among those that this rank sent to rank r, or -1 if it was
// not sent there. own_row, own_weight: lane k: kGrouped and own_in_place: the row of entry k in y, or -1.
struct Token {
  int number;
  int position = -1;
  int own_row = -1;
  float own_weight = 0;
  bool own_summed = false;  // whether its own rows are summed already, in `out`
};

// kGrouped and not kExact: what this rank's own experts computed is summed by itself, like the share of another rank.
constexpr int kSets = kGrouped && !kExact ? 2 : 1;

// What is added up for a token: what ranks returned (kExact: of entries), and own rows if they are a set of their own.
struct Rows {
  Summands set[kSets];  // own rows first
  EPRT_DEVICE Summands& returned() { return set[kSets - 1]; }
};

// A warp that receives.
struct Receiver {
  const CombineParams& p;
  SharedCombine* shared;
  Returned returned;
  int lane;
  bool in_place;  // lane r: r is this rank and its rows stay in y

  EPRT_DEVICE int position_of(int token) const {
    return token < p.num_tokens && lane < kRanks ? p.layout.position[int64_t(token) * kRanks + lane] : -1;
  }

  // Loads that depend on those of position_of.
  EPRT_DEVICE Token read_token(int number, int position) const {
    Token token{number, position};
    if (!kGrouped || !own_in_place(p)) return token;
    const int own_position = __shfl_sync(kAllLanes, position, p.context.rank);
    if (own_position < 0 || lane >= p.top_k) return token;
    const int64_t entry = int64_t(returned.own_first + own_position) * p.top_k + lane;
    token.own_row = p.item_row[entry];
    token.own_weight = p.item_weight[entry];
    return token;
  }

  EPRT_DEVICE const uint32_t* flag_of(int position) const {
    const Context& c = p.context;
    return flag_at(c, c.heap.returned, c.rank, shared->call.epoch, returned.first + max(position, 0));
  }

  EPRT_DEVICE bool masked() const { return lane < kRanks && load_relaxed(p.context.deadline.mask + lane); }

  // Lane r: waits for the row of rank r; false if there is none or it does not arrive.
  EPRT_DEVICE bool wait(int position) const {
    return position >= 0 && !masked() &&
           (in_place ||
            wait_peer(p.context, &shared->call.book, flag_of(position), shared->call.epoch, kCombineRows, lane));
  }

  // Whether all of a token's rows have arrived, without waiting.
  EPRT_DEVICE bool all_here(int position) const {
    const bool wanted = position >= 0 && !masked();
    const bool here = in_place || load_acquire_sys(flag_of(position)) == shared->call.epoch;
    return __all_sync(kAllLanes, position < 0 || (wanted && here));
  }

  // Adds up the weights that came with a token's rows.
  EPRT_DEVICE void sum_weights(int64_t token, const uint8_t* row, int item, uint32_t came) const {
    const uint8_t* from =
        in_place ? reinterpret_cast<const uint8_t*>(p.y_weight + int64_t(item) * p.top_k) : row + p.row_bytes;
    float weight = 0.f;
    for (uint32_t left = came; left; left &= left - 1) {
      const uint8_t* weights = pointer_of(from, __ffs(left) - 1);
      if (lane < p.top_k) weight += __uint_as_float(load_relaxed(reinterpret_cast<const uint32_t*>(weights) + lane));
    }
    if (lane < p.top_k) p.out_weight[token * p.top_k + lane] = weight;
  }

  // came: lane r: whether rank r's row has arrived.
  EPRT_DEVICE Rows rows_of(const Token& token, bool came) const {
    const Context& c = p.context;
    const uint8_t* block = c.peer[c.rank] + p.block;
    const int number = returned.first + token.position, item = returned.own_first + token.position;
    const bool in_y = !kGrouped && in_place;
    Rows all;
    Summands& rows = all.returned();
    rows = {in_y ? p.y + int64_t(item) * p.row_bytes : block + int64_t(number) * p.stride, 1.f,
            __ballot_sync(kAllLanes, came)};
    __syncwarp();  // orders each lane's acquire before the loads of all lanes
    if (p.out_weight) sum_weights(token.number, rows.row, item, rows.lanes);
    const Summands own{p.y + int64_t(token.own_row) * p.row_bytes, token.own_weight,
                       __ballot_sync(kAllLanes, token.own_row >= 0)};
    if constexpr (kExact) {
      rows.lanes = came_by_entry(p, token.number, rows.lanes, lane);
      rows.row = token.own_row >= 0 ? own.row : block + (int64_t(token.number) * p.top_k + lane) * p.stride;
      if (lane < p.top_k) rows.weight = p.topk_weight[int64_t(token.number) * p.top_k + lane];
    }
    if constexpr (kSets == 2) {
      if (!token.own_summed) all.set[0] = own, rows.lanes &= ~__ballot_sync(kAllLanes, in_place);
      if (token.own_summed && in_place) rows.row = p.out + int64_t(token.number) * p.row_bytes;
    }
    if (p.bias[0]) {  // biases are added first
      const uint64_t earlier = __shfl_up_sync(kAllLanes, uint64_t(rows.row), kBiases);
      rows.lanes = rows.lanes << kBiases | (p.bias[1] ? 3 : 1);
      rows.row = lane < kBiases ? p.bias[lane] + int64_t(token.number) * p.row_bytes
                                : reinterpret_cast<const uint8_t*>(earlier);
    }
    bulk_fence_global();  // orders the loads that saw the flags before the bulk copies that read the rows
    return all;
  }

  // Adds up a piece of a token's rows.
  template <class AnyFeed, class Refill>
  EPRT_DEVICE void sum_rows(float (&sum)[kSumSteps][8], AnyFeed& feed, Rows& rows, Refill refill) const {
    const Summands& returned = rows.returned();
    if constexpr (kSets == 1) {
      sum_piece<kExact>(sum, feed, returned.lanes, returned.weight, lane, refill);
    } else {  // in order of rank; this rank's share is rounded as if it had been returned
      const Summands& own = rows.set[0];
      Vec16 share[kSumSteps];
      if (own.lanes) sum_piece<true>(sum, feed, own.lanes, own.weight, lane, refill);
#pragma unroll
      for (int i = 0; i < kSumSteps; ++i) {
        share[i] = rounded(sum[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] = 0.f;
      }
      const uint32_t earlier = (1u << p.context.rank) - 1;
      sum_piece<false>(sum, feed, returned.lanes & earlier, 1.f, lane, refill);
      if (own.lanes)
#pragma unroll
        for (int i = 0; i < kSumSteps; ++i) add<false>(sum[i], share[i], 1.f);
      sum_piece<false>(sum, feed, returned.lanes & ~earlier, 1.f, lane, refill);
    }
  }

  // Of a token whose rows have not all come: sums its own rows meanwhile.
  template <class AnyFeed>
  EPRT_DEVICE void sum_own(Token& token, AnyFeed& feed) const {
    const uint32_t lanes = __ballot_sync(kAllLanes, token.own_row >= 0);
    if (kSets == 1 || !lanes || all_here(token.position)) return;
    feed.begin({{p.y + int64_t(token.own_row) * p.row_bytes, 0.f, lanes}});
    const auto refill = [&] { feed.load(lane); };
    refill();
    uint8_t* to = p.out + int64_t(token.number) * p.row_bytes;
    for (int at = 0; at < p.row_bytes; at += kSumBytes) {
      float sum[kSumSteps][8] = {};
      sum_piece<true>(sum, feed, lanes, token.own_weight, lane, refill);
      put_piece(to + at, sum, min(kSumBytes, p.row_bytes - at), lane);
    }
    token.own_summed = true;
  }

  // Sums tokens; while a token's rows are summed, the next token's rows are loaded if they have arrived.
  EPRT_DEVICE void sum_tokens(Turns turns, uint8_t* slots, uint64_t* full) {
    Feed<kSumSlots, kSets> feed(slots, full, p.row_bytes, lane);
    Rows rows, next_rows;
    bool begun = false;  // whether the rows of the token (in refill: of the next one) are being loaded
    Token token = read_token(turns.number[0], position_of(turns.number[0]));
    int next_position = position_of(turns.number[1]);
    for (; turns.number[0] < p.num_tokens; turns.step(lane)) {
      const Token next = read_token(turns.number[1], next_position);
      next_position = position_of(turns.number[2]);
      if (!begun) sum_own(token, feed);
      if (!begun) feed.begin((rows = rows_of(token, wait(token.position))).set);
      begun = false;
      const auto refill = [&] {
        if (feed.done() && !begun && next.number < p.num_tokens && all_here(next.position)) {
          feed.begin((next_rows = rows_of(next, next.position >= 0)).set);
          begun = true;
        }
        feed.load(lane);
      };
      refill();
      uint8_t* to = p.out + int64_t(token.number) * p.row_bytes;
      for (int at = 0; at < p.row_bytes; at += kSumBytes) {
        float sum[kSumSteps][8] = {};
        sum_rows(sum, feed, rows, refill);
        put_piece(to + at, sum, min(kSumBytes, p.row_bytes - at), lane);
      }
      rows = next_rows, token = next;
    }
  }
};

EPRT_DEVICE void receive(const CombineParams& p, SharedCombine* shared, uint8_t* slots, int lane) {
  const int warp = threadIdx.x / kWarp;
  if (!(p.phases & kRecv) || warp >= p.division.recv_warps) return;
  const Share share = share_of(p.division, p.phases, kRecv);
  const Turns turns(p.context, kCombine, kRecv, shared->call.epoch, share, lane);
  Receiver receiver{p, shared, find_returned(p, lane), lane, own_in_place(p) && lane == p.context.rank};
  receiver.sum_tokens(turns, slots, shared->full[warp][1]);
}

__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ SharedCombine shared;
  const Context& c = p.context;
  const int lane = threadIdx.x % kWarp;
  if (kStats && blockIdx.x == 0 && threadIdx.x == 0 && (p.phases & kSend))
    *c.stats.compute_ns += global_timer_ns() - *p.layout.received_ns;
  const auto tell_places = [&] {
    if (kGrouped || threadIdx.x >= kWarp) return;
    const int first = find_returned(p, lane).first;
    if (lane < kRanks && !load_relaxed(c.deadline.mask + lane))
      tell_place(c, c.heap.combine_place, lane, shared.call.epoch, p.block, first);
  };
  const auto move = [&](int warp) {
    uint8_t* slots = smem + warp * kWarpBytes;
    send(p, &shared, slots, lane);
    receive(p, &shared, slots, lane);
  };
  run_call(p, kCombine, &shared.call, tell_places, move);
}

}  // namespace eprt::normal
