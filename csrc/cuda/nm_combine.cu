// Normal-mode combine. Send: the rank that ran the experts gives each item back to its owner, one bf16 row, the
// weighted fp32 sum of the item's rows (EXACT: each row by itself). Receive: the owner sums the rows of a token as they
// come.
#include "normal.cuh"

namespace eprt::normal {

struct CombineParams {
  Context context;
  Layout layout;
  const uint8_t* y;           // bf16 [rows, H]
  const float* y_weight;      // [items, K], sent along; or null
  const int32_t* item_row;    // [items, K] rows or -1; null: an item is a row, and is not weighted
  const float* item_weight;   // [items, K]
  const int32_t* item_token;  // [items], with `exact`
  const void* topk_slot;      // the owner's own [T, K], with `exact`
  const float* topk_weight;   // the same
  const uint8_t* bias[2];     // bf16 [T, H], or null
  uint8_t* out;               // bf16 [T, H]
  float* out_weight;          // [T, K], with y_weight
  uint64_t block;             // own block of returned rows: offset in the heap, a multiple of 128
  int32_t num_tokens;         // T
  int32_t top_k;              // K
  int32_t num_slots;          // S
  int32_t slot_bytes;         // of one topk_slot
  int32_t row_bytes;          // 2 H
  int32_t stride;             // of returned rows: row_bytes, and the weights when they are sent
  int32_t exact;              // returned row token * K + k; else items in order of rank and position
  int32_t phases;
};

struct SharedCombine {
  WaitBook book;
  uint32_t epoch;
};

struct Sum {
  float v[kPieceLane][8];
};

EPRT_DEVICE void clear(Sum& sum) {
#pragma unroll
  for (int i = 0; i < kPieceLane; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) sum.v[i][j] = 0.f;
}

// Rounds after the product and after the sum: the same bits as the CPU's.
EPRT_DEVICE void add_weighted(Sum& sum, const uint8_t* slot, float weight, int lane) {
#pragma unroll
  for (int i = 0; i < kPieceLane; ++i) {
    const Vec16 v = *reinterpret_cast<const Vec16*>(slot + (lane + i * kWarp) * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum.v[i][2 * j] = __fadd_rn(sum.v[i][2 * j], __fmul_rn(weight, bf16_lo(v.w[j])));
      sum.v[i][2 * j + 1] = __fadd_rn(sum.v[i][2 * j + 1], __fmul_rn(weight, bf16_hi(v.w[j])));
    }
  }
}

EPRT_DEVICE void add(Sum& sum, const uint8_t* slot, int lane) {
#pragma unroll
  for (int i = 0; i < kPieceLane; ++i) {
    const Vec16 v = *reinterpret_cast<const Vec16*>(slot + (lane + i * kWarp) * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum.v[i][2 * j] = __fadd_rn(sum.v[i][2 * j], bf16_lo(v.w[j]));
      sum.v[i][2 * j + 1] = __fadd_rn(sum.v[i][2 * j + 1], bf16_hi(v.w[j]));
    }
  }
}

EPRT_DEVICE void round_to_slot(uint8_t* slot, const Sum& sum, int lane) {
#pragma unroll
  for (int i = 0; i < kPieceLane; ++i) {
    Vec16 v;
#pragma unroll
    for (int j = 0; j < 4; ++j) v.w[j] = pack_bf16(sum.v[i][2 * j], sum.v[i][2 * j + 1]);
    *reinterpret_cast<Vec16*>(slot + (lane + i * kWarp) * 16) = v;
  }
}

// Counts pieces of n rows, piece by piece, in each the rows in order.
struct Walk {
  int piece = 0, row = 0;
  EPRT_DEVICE void step(int n) {
    if (++row == n) row = 0, ++piece;
  }
};

// Streams the sum of n rows, the j-th at address lane j has, times lane j's weight (or 1), to `to`. `between` runs when
// the first pieces are under way.
template <class Between>
EPRT_DEVICE void sum_rows(Ring& ring, int n, const uint8_t* my_row, float my_weight, bool weighted, int row_bytes,
                          uint8_t* to, int lane, const Between& between) {
  const int pieces = ceil_div(row_bytes, kPieceBytes);
  Walk load, used;
  Sum sum;
  const auto source = [&](int) {
    const uint64_t row = __shfl_sync(kAllLanes, uint64_t(my_row), load.row);
    const Piece piece{reinterpret_cast<const uint8_t*>(row) + load.piece * kPieceBytes,
                      piece_bytes(row_bytes, load.piece)};
    load.step(n);
    return piece;
  };
  const auto use = [&](int, uint8_t* slot) {
    if (n > 1 || weighted) {
      if (used.row == 0) clear(sum);
      if (weighted)
        add_weighted(sum, slot, __shfl_sync(kAllLanes, my_weight, used.row), lane);
      else
        add(sum, slot, lane);
    }
    if (used.row == n - 1) {
      if (n > 1 || weighted) {
        round_to_slot(slot, sum, lane);
        bulk_fence();
        __syncwarp();
      }
      if (lane == 0) bulk_store(to + used.piece * kPieceBytes, slot, piece_bytes(row_bytes, used.piece));
    }
    const bool stores = used.row == n - 1;
    used.step(n);
    return stores;
  };
  ring.begin(n * pieces, lane, source);
  between();
  ring.finish(n * pieces, lane, source, use);
}

// Lane j < n gets the value of the lane of the j-th set bit.
EPRT_DEVICE const uint8_t* gather(const uint8_t* value, uint32_t bits, int lane) {
  const uint32_t at = __fns(bits, 0, lane + 1);
  return reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, uint64_t(value), at < kWarp ? at : 0));
}

EPRT_DEVICE float gather(float value, uint32_t bits, int lane) {
  const uint32_t at = __fns(bits, 0, lane + 1);
  return __shfl_sync(kAllLanes, value, at < kWarp ? at : 0);
}

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

EPRT_DEVICE void send(const CombineParams& p, SharedCombine* shared, SharedWarp* mine, Ring& ring, int lane) {
  const Context& c = p.context;
  const Share share = share_of(p.phases, kSend);
  LateFlag late{&mine->desk};
  if (!share.takes_part) return late.close(lane);
  const Owner owners = find_owner(p, shared, lane);
  const int most = __reduce_max_sync(kAllLanes, owners.num_items);
  const uint32_t epoch = shared->epoch;
  for (int unit = share.index; unit < most * kRanks; unit += share.count) {
    // In turns, beginning after this rank, so that not every rank sends to rank 0 first.
    const int owner = (c.rank + 1 + unit % kRanks) % kRanks, position = unit / kRanks;
    if (position >= __shfl_sync(kAllLanes, owners.num_items, owner)) continue;
    const int64_t item = __shfl_sync(kAllLanes, owners.first_item, owner) + position;
    const int returned = int(__shfl_sync(kAllLanes, owners.place.number, owner)) + position;
    uint8_t* block = c.peer[owner] + uint64_t(__shfl_sync(kAllLanes, owners.place.start, owner)) * 128;
    uint8_t* to = block + int64_t(returned) * p.stride;
    const auto between = [&] { late.hand_in(lane); };
    if (p.item_row == nullptr) {
      const uint8_t* row = p.y + item * p.row_bytes;
      sum_rows(ring, 1, row, 1.f, false, p.row_bytes, to, lane, between);
      if (p.y_weight && lane < p.top_k)
        reinterpret_cast<float*>(to + p.row_bytes)[lane] = p.y_weight[item * p.top_k + lane];
    } else {
      const int row = lane < p.top_k ? p.item_row[item * p.top_k + lane] : -1;
      const float weight = lane < p.top_k ? p.item_weight[item * p.top_k + lane] : 0.f;
      const uint8_t* from = p.y + int64_t(row) * p.row_bytes;
      const uint32_t rows = __ballot_sync(kAllLanes, row >= 0);
      if (!p.exact) {
        const int n = __popc(rows);
        sum_rows(ring, n, gather(from, rows, lane), gather(weight, rows, lane), true, p.row_bytes, to, lane, between);
      } else {
        const int64_t token = p.item_token[item];
        between();
        for (uint32_t left = rows; left; left &= left - 1) {
          const int k = __ffs(left) - 1;
          const uint8_t* row_k = reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, uint64_t(from), k));
          sum_rows(ring, 1, row_k, 1.f, false, p.row_bytes, block + (token * p.top_k + k) * p.stride, lane, [] {});
        }
      }
    }
    if (lane == 0) late.flag = flag_at(c, c.heap.returned, owner, epoch, returned);
  }
  late.close(lane);
}

// ---- receive
// ---------------------------------------------------------------------------------------------------------

// Lane k: whether the row of entry k came, given which ranks' items came.
EPRT_DEVICE uint32_t came_by_entry(const CombineParams& p, int64_t token, uint32_t ranks, int lane) {
  int slot = -1;
  if (lane < p.top_k) slot = read_index(p.topk_slot, p.slot_bytes, token * p.top_k + lane, p.num_slots);
  return __ballot_sync(kAllLanes, slot >= 0 && (ranks >> (slot / (p.num_slots / kRanks))) & 1);
}

EPRT_DEVICE void sum_token(const CombineParams& p, SharedCombine* shared, Ring& ring, int first, int64_t token,
                           int lane) {
  const Context& c = p.context;
  // Lane r waits for rank r's row, which is number first + position.
  const int position = lane < kRanks ? p.layout.position[token * kRanks + lane] : -1;
  const uint32_t* flag = flag_at(c, c.heap.returned, c.rank, shared->epoch, first + max(position, 0));
  const bool came = position >= 0 && !load_relaxed(c.deadline.mask + lane) &&
                    wait_peer(c, &shared->book, flag, shared->epoch, kCombineRows, lane);
  uint32_t bits = __ballot_sync(kAllLanes, came);
  const uint8_t* block = c.peer[c.rank] + p.block;
  const uint8_t* row = block + int64_t(first + max(position, 0)) * p.stride;
  bulk_fence();  // what the flag says is there is next read by bulk copies
  if (p.out_weight && lane < kWarp) {
    float weight = 0.f;
    for (uint32_t left = bits; left; left &= left - 1) {
      const uint64_t from = __shfl_sync(kAllLanes, uint64_t(row), __ffs(left) - 1);
      if (lane < p.top_k)
        weight += __uint_as_float(load_relaxed(reinterpret_cast<const uint32_t*>(from + p.row_bytes) + lane));
    }
    if (lane < p.top_k) p.out_weight[token * p.top_k + lane] = weight;
  }
  float weight = 1.f;
  if (p.exact) {
    bits = came_by_entry(p, token, bits, lane);
    row = block + (token * p.top_k + lane) * p.stride;
    if (lane < p.top_k) weight = p.topk_weight[token * p.top_k + lane];
  }
  int n = __popc(bits);
  const uint8_t* from = gather(row, bits, lane);
  const float factor = gather(weight, bits, lane);
#pragma unroll
  for (int b = 1; b >= 0; --b) {  // biases come first
    if (!p.bias[b]) continue;
    const uint64_t above = __shfl_up_sync(kAllLanes, uint64_t(from), 1);
    from = lane == 0 ? p.bias[b] + token * p.row_bytes : reinterpret_cast<const uint8_t*>(above);
    ++n;
  }
  uint8_t* out = p.out + token * p.row_bytes;
  if (n == 0)
    for (int at = lane * 16; at < p.row_bytes; at += kWarp * 16) store(out + at, Vec16{});
  else
    sum_rows(ring, n, from, factor, p.exact, p.row_bytes, out, lane, [] {});
}

// Where rank `lane`'s rows begin among those that come back: items in order of rank.
EPRT_DEVICE int first_returned(const CombineParams& p, int lane) {
  return sum_below(lane < kRanks ? p.layout.sent[p.context.rank * kRanks + lane] : 0, lane);
}

EPRT_DEVICE void receive(const CombineParams& p, SharedCombine* shared, Ring& ring, int lane) {
  const Share share = share_of(p.phases, kRecv);
  if (!share.takes_part) return;
  const int first = first_returned(p, lane);
  for (int token = share.index; token < p.num_tokens; token += share.count)
    sum_token(p, shared, ring, first, token, lane);
}

// Block 0: tells everyone where the outputs of this rank's tokens go.
EPRT_DEVICE void tell_places(const CombineParams& p, uint32_t epoch) {
  const Context& c = p.context;
  const int lane = threadIdx.x;
  if (blockIdx.x != 0 || lane >= kWarp) return;
  const int first = first_returned(p, lane);
  if (lane < kRanks && !load_relaxed(c.deadline.mask + lane))
    tell_place(c, c.heap.combine_place, lane, epoch, p.block, first);
}

__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ CombineParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ SharedCombine shared;
  const Context& c = p.context;
  const int lane = threadIdx.x % kWarp;
  SharedWarp* const warps = reinterpret_cast<SharedWarp*>(smem);
  SharedWarp* const mine = warps + threadIdx.x / kWarp;
  const bool moves = threadIdx.x < kWarps * kWarp;
  if (threadIdx.x == 0) {
    if (p.phases & kSend) {
      shared.epoch = take_ticket(c, kCombineTicket);
      if (blockIdx.x == 0) p.layout.epoch[1] = shared.epoch;
      if (kStats && blockIdx.x == 0) *c.stats.compute_ns += global_timer_ns() - *p.layout.received_ns;
    } else {
      shared.epoch = p.layout.epoch[1];
    }
  }
  open_book(&shared.book, blockIdx.x == 0);
  if (moves) mine->desk.state = kEmpty;
  __syncthreads();
  if (p.phases & kSend) tell_places(p, shared.epoch);
  if (moves) {
    Ring ring(mine->slot[0], mine->full, lane);
    if (p.phases & kSend) send(p, &shared, mine, ring, lane);
    if (p.phases & kRecv) receive(p, &shared, ring, lane);
    bulk_wait_written();
  } else if (p.phases & kSend) {
    raise_flags<kWarps>(warps, shared.epoch, lane);
  }
  __syncthreads();
  close_book(c, &shared.book, 1);
}

}  // namespace eprt::normal
