// Normal-mode combine. Send: the rank that ran the experts gives each item back to its owner, one bf16 row, the
// weighted fp32 sum of the item's rows (EXACT: each row by itself). Receive: the owner sums the rows of a token as they
// come. Sums are made in registers. What crosses leaves by bulk copies, which tell when they are written: a fence would
// wait for the plain stores of all warps.
#include "bulk.cuh"
#include "normal.cuh"
#include "rows.cuh"

namespace eprt::normal {

constexpr int kWarps = 15;                      // that move data;
constexpr int kThreads = (kWarps + 1) * kWarp;  // one more raises flags

constexpr int kBiases = 2;
static_assert(kRanks + kBiases <= kWarp, "a lane stands for a rank, or a bias");

struct CombineParams {
  Context context;
  Layout layout;
  const uint8_t* y;              // bf16 [rows, H]
  const float* y_weight;         // [items, K], sent along; or null
  const int32_t* item_row;       // [items, K] rows or -1; null: an item is a row, and is not weighted
  const float* item_weight;      // [items, K]
  const int32_t* item_token;     // [items], with `exact`
  const void* topk_slot;         // the owner's own [T, K], with `exact`
  const float* topk_weight;      // the same
  const uint8_t* bias[kBiases];  // bf16 [T, H], or null
  uint8_t* out;                  // bf16 [T, H]
  float* out_weight;             // [T, K], with y_weight
  uint64_t block;                // own block of returned rows: offset in the heap, a multiple of 128
  int32_t num_tokens;            // T
  int32_t top_k;                 // K
  int32_t num_slots;             // S
  int32_t slot_bytes;            // of one topk_slot
  int32_t row_bytes;             // 2 H
  int32_t stride;                // of returned rows: row_bytes, and the weights when they are sent
  int32_t phases;
  int32_t piece_bytes;  // of a row, at most, through shared memory at once; a multiple of 512
  Division division;
};

struct SharedCombine {
  WaitBook book;
  FlagDesk desk[kWarps];
  uint64_t full[kWarps][kSlots];
  Summands summands[kWarps];
  uint32_t epoch;
};

// ---- send
// ------------------------------------------------------------------------------------------------------------

struct Owner {  // lane r: rank r
  int first_item, num_items;
  Place place;  // number: the first of our items among its returned rows
};

EPRT_DEVICE Owner find_owner(const CombineParams& p, SharedCombine* shared, int lane) {
  const Context& c = p.context;
  const int count = lane < kRanks ? p.layout.sent[lane * kRanks + c.rank] : 0;
  Owner owner{sum_below(count, lane), count, {}};
  owner.place = wait_place(c, &shared->book, c.heap.combine_place, shared->epoch, kCombinePlace, lane, count > 0);
  if (!owner.place.known) owner.num_items = 0;
  return owner;
}

struct Item {
  int owner;         // -1: no more
  int64_t number;    // among ours
  int returned;      // among its owner's
  int row = -1;      // lane k: of entry k, or -1
  float weight = 0;  // lane k
};

// A warp's items. Owners take turns, beginning after this rank, so that not every rank sends to rank 0 first. Rows that
// are items and our own stay where they are: the receiving warps read them there.
struct Items {
  int unit, stride, turns, most;

  EPRT_DEVICE Items(const CombineParams& p, const Owner& owners, const Share& share, int lane)
      : unit(share.index), stride(share.count), turns(kGrouped ? kRanks : kRanks - 1) {
    most = __reduce_max_sync(kAllLanes, kGrouped || lane != p.context.rank ? owners.num_items : 0);
  }

  EPRT_DEVICE Item next(const CombineParams& p, const Owner& owners, int lane) {
    while (unit < most * turns) {
      const int owner = (p.context.rank + 1 + unit % turns) % kRanks, position = unit / turns;
      unit += stride;
      if (position >= __shfl_sync(kAllLanes, owners.num_items, owner)) continue;
      Item item{owner};
      item.number = __shfl_sync(kAllLanes, owners.first_item, owner) + position;
      item.returned = int(__shfl_sync(kAllLanes, owners.place.number, owner)) + position;
      if (kGrouped && lane < p.top_k) {
        item.row = p.item_row[item.number * p.top_k + lane];
        item.weight = p.item_weight[item.number * p.top_k + lane];
      }
      return item;
    }
    return {-1};
  }
};

// One warp's end.
struct Sender {
  const CombineParams& p;
  const Owner& owners;
  uint32_t epoch;
  uint8_t* slots;  // [kSlots][piece_bytes]
  Summands* summands;
  int lane;
  LateFlags late;
  uint32_t num_pieces = 0;

  EPRT_DEVICE uint8_t* block_of(const Item& item) const {  // where this rank's rows lie at the owner
    return p.context.peer[item.owner] + uint64_t(__shfl_sync(kAllLanes, owners.place.start, item.owner)) * 128;
  }

  EPRT_DEVICE int bytes_of(int piece) const { return min(p.piece_bytes, p.row_bytes - piece * p.piece_bytes); }

  EPRT_DEVICE void sent(const Item& item) {
    const Context& c = p.context;
    late.add(lane == 0 ? flag_at(c, c.heap.returned, item.owner, epoch, item.returned) : nullptr, lane);
  }

  // Rows that are items, as they are.
  EPRT_DEVICE void send_rows(Items items, uint64_t* full) {
    const int pieces = ceil_div(p.row_bytes, p.piece_bytes);
    Ring ring(slots, full, p.piece_bytes, lane);
    Items items_ahead = items;
    Item ahead = items_ahead.next(p, owners, lane);
    int piece_ahead = 0;
    const auto load_ahead = [&] {
      if (ahead.owner < 0) return;
      const uint8_t* from = p.y + ahead.number * p.row_bytes + piece_ahead * p.piece_bytes;
      ring.load(from, bytes_of(piece_ahead), lane);
      if (++piece_ahead < pieces) return;
      piece_ahead = 0;
      ahead = items_ahead.next(p, owners, lane);
    };
    for (int i = 0; i < kSlots; ++i) load_ahead();
    for (Item item = items.next(p, owners, lane); item.owner >= 0; item = items.next(p, owners, lane)) {
      uint8_t* to = block_of(item) + int64_t(item.returned) * p.stride;
      for (int piece = 0; piece < pieces; ++piece) {
        store_piece(lane == 0 ? to + piece * p.piece_bytes : nullptr, ring.take(), bytes_of(piece), lane);
        bulk_wait_read<0>();  // the slot may be written again
        __syncwarp();
        load_ahead();
      }
      if (p.y_weight && lane < p.top_k)
        reinterpret_cast<float*>(to + p.row_bytes)[lane] = p.y_weight[item.number * p.top_k + lane];
      sent(item);
    }
  }

  // Rows by expert: an item's weighted sum, or, exact, each row by itself.
  EPRT_DEVICE void send_sums(Items items) {
    Item item = items.next(p, owners, lane);
    while (item.owner >= 0) {
      const Item next = items.next(p, owners, lane);  // its loads are under way while this one is sent
      uint8_t* block = block_of(item);
      __syncwarp();
      summands->row[lane] = p.y + int64_t(item.row) * p.row_bytes;
      summands->weight[lane] = item.weight;
      __syncwarp();
      uint32_t rows = __ballot_sync(kAllLanes, item.row >= 0);
      if constexpr (!kExact) {
        send_sum<true>(rows, block + int64_t(item.returned) * p.stride);
      } else {
        const int64_t token = p.item_token[item.number];
        for (; rows; rows &= rows - 1) {
          const int k = __ffs(rows) - 1;
          send_sum<false>(1u << k, block + (token * p.top_k + k) * p.stride);
        }
      }
      sent(item);
      item = next;
    }
  }

  template <bool kWeighted>
  EPRT_DEVICE void send_sum(uint32_t rows, uint8_t* to) {
    for (int at = 0; at < p.row_bytes; at += p.piece_bytes) {
      const int end = min(at + p.piece_bytes, p.row_bytes);
      uint8_t* slot = slots + num_pieces++ % kSlots * p.piece_bytes;
      bulk_wait_read<kSlots - 1>();  // what was in the slot has left
      __syncwarp();
      sum_rows<kWeighted, 2, 4>(*summands, rows, at, end, slot, lane);
      bulk_fence();
      __syncwarp();
      store_piece(lane == 0 ? to + at : nullptr, slot, end - at, lane);
    }
  }
};

EPRT_DEVICE void send(const CombineParams& p, SharedCombine* shared, uint8_t* slots, int lane) {
  const Share share = share_of<kWarps>(p.division, p.phases, kSend);
  if (!share.takes_part) return;
  const int warp = threadIdx.x / kWarp;
  const Owner owners = find_owner(p, shared, lane);
  const Items items(p, owners, share, lane);
  Sender sender{p, owners, shared->epoch, slots, shared->summands + warp, lane, {shared->desk + warp}};
  if constexpr (kGrouped)
    sender.send_sums(items);
  else
    sender.send_rows(items, shared->full[warp]);
  sender.late.close(lane);
}

// ---- receive
// ---------------------------------------------------------------------------------------------------------

// Lane k: whether the row of entry k came, given which ranks' items came.
EPRT_DEVICE uint32_t came_by_entry(const CombineParams& p, int64_t token, uint32_t ranks, int lane) {
  int slot = -1;
  if (lane < p.top_k) slot = read_index(p.topk_slot, p.slot_bytes, token * p.top_k + lane, p.num_slots);
  return __ballot_sync(kAllLanes, slot >= 0 && (ranks >> (slot / (p.num_slots / kRanks))) & 1);
}

struct Returned {  // lane r: what rank r gives back
  int first;       // of its rows among those that come back: items in order of rank
  int own_first;   // of this rank's items among those it received
};

EPRT_DEVICE Returned find_returned(const CombineParams& p, int lane) {
  const int rank = p.context.rank;
  const int sent = lane < kRanks ? p.layout.sent[rank * kRanks + lane] : 0;
  const int received = lane < kRanks ? p.layout.sent[lane * kRanks + rank] : 0;
  return {sum_below(sent, lane), __shfl_sync(kAllLanes, sum_below(received, lane), rank)};
}

// bits: the ranks whose rows have come. position: lane r's of the token among those for rank r.
EPRT_DEVICE void sum_token(const CombineParams& p, Summands* summands, const Returned& returned, int64_t token,
                           uint32_t bits, int position, int lane) {
  const Context& c = p.context;
  const uint8_t* block = c.peer[c.rank] + p.block;
  const bool in_place = !kGrouped && lane == c.rank;  // see Items
  const int number = returned.first + position, item = returned.own_first + position;
  const uint8_t* row = in_place ? p.y + int64_t(item) * p.row_bytes : block + int64_t(number) * p.stride;
  if (p.out_weight) {
    const uint8_t* weights =
        in_place ? reinterpret_cast<const uint8_t*>(p.y_weight + int64_t(item) * p.top_k) : row + p.row_bytes;
    float weight = 0.f;
    for (uint32_t left = bits; left; left &= left - 1) {
      const uint8_t* from = pointer_of(weights, __ffs(left) - 1);
      if (lane < p.top_k) weight += __uint_as_float(load_relaxed(reinterpret_cast<const uint32_t*>(from) + lane));
    }
    if (lane < p.top_k) p.out_weight[token * p.top_k + lane] = weight;
  }
  float weight = 1.f;
  if constexpr (kExact) {
    bits = came_by_entry(p, token, bits, lane);
    row = block + (token * p.top_k + lane) * p.stride;
    if (lane < p.top_k) weight = p.topk_weight[token * p.top_k + lane];
  }
  if (p.bias[0]) {  // biases come first
    const uint64_t earlier = __shfl_up_sync(kAllLanes, uint64_t(row), kBiases);
    bits = bits << kBiases | (p.bias[1] ? 3 : 1);
    row = lane < kBiases ? p.bias[lane] + token * p.row_bytes : reinterpret_cast<const uint8_t*>(earlier);
  }
  __syncwarp();
  summands->row[lane] = row;
  summands->weight[lane] = weight;
  __syncwarp();
  uint8_t* out = p.out + token * p.row_bytes;
  sum_rows<kExact, 4, 3>(*summands, bits, 0, p.row_bytes, out, lane);
}

// A token at a time: with several, the last ones to come would wait for the sums of others.
EPRT_DEVICE void receive(const CombineParams& p, SharedCombine* shared, int lane) {
  const Context& c = p.context;
  const Share share = share_of<kWarps>(p.division, p.phases, kRecv);
  if (!share.takes_part) return;
  Summands* summands = shared->summands + threadIdx.x / kWarp;
  const Returned returned = find_returned(p, lane);
  const bool in_place = !kGrouped && lane == c.rank;
  const auto position_of = [&](int token) {  // lane r: among the tokens for rank r, or -1
    return token < p.num_tokens && lane < kRanks ? p.layout.position[int64_t(token) * kRanks + lane] : -1;
  };
  int position = position_of(share.index);
  for (int token = share.index; token < p.num_tokens; token += share.count) {
    const int next = position_of(token + share.count);
    const uint32_t* flag = flag_at(c, c.heap.returned, c.rank, shared->epoch, returned.first + max(position, 0));
    const bool came = position >= 0 && !load_relaxed(c.deadline.mask + lane) &&
                      (in_place || wait_peer(c, &shared->book, flag, shared->epoch, kCombineRows, lane));
    sum_token(p, summands, returned, token, __ballot_sync(kAllLanes, came), position, lane);
    position = next;
  }
}

// Block 0: tells everyone where the outputs of this rank's tokens go.
EPRT_DEVICE void tell_places(const CombineParams& p, uint32_t epoch) {
  const Context& c = p.context;
  const int lane = threadIdx.x;
  if (blockIdx.x != 0 || lane >= kWarp) return;
  const int first = find_returned(p, lane).first;
  if (lane < kRanks && !load_relaxed(c.deadline.mask + lane))
    tell_place(c, c.heap.combine_place, lane, epoch, p.block, first);
}

__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ SharedCombine shared;
  const Context& c = p.context;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (threadIdx.x == 0) {
    if (p.phases & kSend) {
      shared.epoch = take_ticket(c, kCombineTicket);
      if (blockIdx.x == 0) p.layout.epoch[1] = shared.epoch;
      if (kStats && blockIdx.x == 0) *c.stats.compute_ns += global_timer_ns() - *p.layout.received_ns;
    } else {
      shared.epoch = p.layout.epoch[1];
    }
  }
  open_book(&shared.book, keeps_book(p.division, p.phases));
  if (warp < kWarps)
    shared.desk[warp].state = share_of<kWarps>(p.division, p.phases, kSend).takes_part ? kEmpty : kClosed;
  __syncthreads();
  if (p.phases & kSend) tell_places(p, shared.epoch);
  if (warp == kWarps) {
    raise_flags<kWarps>(shared.desk, shared.epoch, lane);
  } else {
    send(p, &shared, smem + warp * kSlots * p.piece_bytes, lane);
    receive(p, &shared, lane);
  }
  __syncthreads();
  close_book(c, &shared.book, 1);
}

}  // namespace eprt::normal
