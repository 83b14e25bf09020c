// Normal-mode dispatch. Send: a token goes once to each rank it has experts on, by bulk copies straight to its row
// there. Receive: the rank waits for its items; grouped, it copies a row to those of the item's other experts.
#include "normal.cuh"

namespace eprt::normal {

struct DispatchParams {
  Context context;
  Layout layout;
  const uint8_t* x;          // [T] rows of x_bytes
  const uint32_t* scale;     // word (token, g) at token * scale_row_stride + g * scale_group_stride, or null
  const void* topk_slot;     // [T, K] or null
  const float* topk_weight;  // [T, K]
  int64_t scale_row_stride;
  int64_t scale_group_stride;
  uint64_t block;        // own block of received rows: offset in the heap, a multiple of 128
  int32_t capacity;      // rows it holds
  int32_t num_tokens;    // T
  int32_t top_k;         // K; 0 without topk_slot
  int32_t num_slots;     // S
  int32_t slot_bytes;    // of one topk_slot: 4 or 8
  int32_t chunk_tokens;  // as in the count
  int32_t x_bytes;       // of a token's values here
  int32_t row_bytes;     // of a row there; half of it when cast
  int32_t num_scales;    // words; 0: none
  int32_t grouped;
  int32_t cast;       // bf16 to fp8 with a scale for each 128 values
  int32_t again;      // another batch of the same layout: `position` is there; entries, weights, tokens are not sent
  int32_t fill_tail;  // entries beyond the received items become -1
  int32_t phases;
};

struct SharedDispatch {
  WaitBook book;
  uint32_t epoch;
};

EPRT_DEVICE int scale_bytes(const DispatchParams& p) { return ceil_div(p.num_scales * 4, 16) * 16; }

EPRT_DEVICE Fields block_fields(const DispatchParams& p, uint64_t capacity) {
  return fields_of(capacity, p.top_k, p.grouped ? 4 : 8, scale_bytes(p));
}

// ---- send
// ------------------------------------------------------------------------------------------------------------

struct Destination {  // lane r: rank r
  uint8_t* block = nullptr;
  Fields fields;
  int capacity = 0;
};

EPRT_DEVICE Destination find_destination(const DispatchParams& p, SharedDispatch* shared, int lane) {
  const Context& c = p.context;
  Destination d;
  const bool wanted = lane < kRanks && p.layout.sent[c.rank * kRanks + lane] > 0;
  const Place place = wait_place(c, &shared->book, c.heap.dispatch_place, shared->epoch, kDispatchPlace, lane, wanted);
  if (!place.known) return d;
  d.block = c.peer[lane] + uint64_t(place.start) * 128;
  d.capacity = place.number;
  d.fields = block_fields(p, place.number);
  return d;
}

struct Route {   // of one token
  int item;      // lane r: its number at rank r, or -1: not sent there
  int row;       // lane r: the row that crosses
  int slot;      // lane k: entry, or -1
  int slot_row;  // lane k: the entry's row, or -1 where it does not fit
  float weight;  // lane k
};

EPRT_DEVICE Route find_route(const DispatchParams& p, const Destination& d, int token, int lane) {
  const Layout& l = p.layout;
  const int columns = p.num_slots + kRanks, slots_per_rank = p.num_slots / kRanks;
  const int32_t* chunk_first = l.chunk_first + int64_t(token / p.chunk_tokens) * columns;
  Route route{-1, -1, -1, -1, 0.f};
  if (lane < kRanks) {
    int position = p.again ? l.position[int64_t(token) * kRanks + lane] : l.rank_index[int64_t(token) * kRanks + lane];
    if (!p.again) {
      if (position >= 0) position += chunk_first[p.num_slots + lane];
      l.position[int64_t(token) * kRanks + lane] = position;
    }
    if (position >= 0 && d.block) route.item = l.base[p.num_slots + lane] + position;
    if (route.item >= d.capacity) {
      if (route.item >= 0) report(p.context.deadline.failure, kOverflow, lane, route.item + 1, d.capacity);
      route.item = -1;
    }
    route.row = route.item;
  }
  if (lane < p.top_k) {
    const int64_t i = int64_t(token) * p.top_k + lane;
    route.slot = read_index(p.topk_slot, p.slot_bytes, i, p.num_slots);
    route.weight = p.topk_weight[i];
    if (p.grouped && route.slot >= 0) route.slot_row = l.base[route.slot] + chunk_first[route.slot] + l.slot_index[i];
  }
  if (!p.grouped) return route;
  const int holder = route.slot < 0 ? -1 : route.slot / slots_per_rank;
  const int capacity = __shfl_sync(kAllLanes, d.capacity, max(holder, 0));
  if (route.slot_row >= capacity) {
    if (capacity > 0) report(p.context.deadline.failure, kOverflow, holder, route.slot_row + 1, capacity);
    route.slot_row = -1;
  }
  // A rank's row that crosses is that of the token's first expert there.
  route.row = -1;
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    const uint32_t here = __ballot_sync(kAllLanes, holder == r && route.slot_row >= 0);
    const int row = __shfl_sync(kAllLanes, route.slot_row, here ? __ffs(here) - 1 : 0);
    if (lane == r && route.item >= 0 && here) route.row = row;
  }
  return route;
}

// What goes with the row: experts, weights, the token's index.
EPRT_DEVICE void send_entries(const DispatchParams& p, const Destination& d, const Route& route, int token, int lane) {
  const int slots_per_rank = p.num_slots / kRanks;
  for (uint32_t left = __ballot_sync(kAllLanes, route.item >= 0); left; left &= left - 1) {
    const int r = __ffs(left) - 1;
    uint8_t* block = reinterpret_cast<uint8_t*>(__shfl_sync(kAllLanes, uint64_t(d.block), r));
    const int64_t item = __shfl_sync(kAllLanes, route.item, r);
    const uint64_t weight = __shfl_sync(kAllLanes, d.fields.weight, r);
    const uint64_t tokens = __shfl_sync(kAllLanes, d.fields.token, r);
    if (lane == 0) reinterpret_cast<int32_t*>(block + tokens)[item] = token;
    if (lane >= p.top_k) continue;
    const bool here = route.slot >= 0 && route.slot / slots_per_rank == r;
    const int64_t i = item * p.top_k + lane;
    if (p.grouped)
      reinterpret_cast<int32_t*>(block)[i] = here ? route.slot_row : -1;
    else
      reinterpret_cast<int64_t*>(block)[i] = here ? route.slot - r * slots_per_rank : -1;
    reinterpret_cast<float*>(block + weight)[i] = here ? route.weight : 0.f;
  }
}

struct Unit {
  Vec16 lo, hi;  // 16 bf16 values
};

// Eight neighbouring lanes hold one scale group of 128 values; all of them take part in the shuffles.
EPRT_DEVICE Vec16 quantize(const Unit& u, float* scale) {
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
  const Fp8Scale s = fp8_scale(amax, false);
  *scale = s.scale;
  Vec16 out;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out.w[i] = pack_fp8(v[4 * i] * s.factor, v[4 * i + 1] * s.factor, v[4 * i + 2] * s.factor, v[4 * i + 3] * s.factor);
  return out;
}

// A piece from bf16 to fp8 in place: what a step writes lies below what the next steps read.
EPRT_DEVICE void cast_piece(uint8_t* slot, int bytes, uint32_t* scale, int lane) {
  for (int at = lane * 32; at - lane * 32 < bytes; at += kWarp * 32) {
    Unit unit = {};
    if (at < bytes)
      unit = {*reinterpret_cast<const Vec16*>(slot + at), *reinterpret_cast<const Vec16*>(slot + at + 16)};
    float s;
    const Vec16 values = quantize(unit, &s);
    __syncwarp();
    if (at < bytes) *reinterpret_cast<Vec16*>(slot + at / 2) = values;
    if (at < bytes && lane % 8 == 0) scale[at / 256] = __float_as_uint(s);
    __syncwarp();
  }
}

EPRT_DEVICE void send(const DispatchParams& p, SharedDispatch* shared, SharedWarp* mine, Ring& ring, int lane) {
  const Context& c = p.context;
  const Share share = share_of(p.grouped ? p.phases : kSend & p.phases, kSend);
  LateFlag late{&mine->desk};
  if (!share.takes_part) return late.close(lane);
  const Destination d = find_destination(p, shared, lane);
  const uint32_t epoch = shared->epoch;
  const int pieces = ceil_div(p.x_bytes, kPieceBytes);
  for (int token = share.index; token < p.num_tokens; token += share.count) {
    const auto source = [&](int i) {
      return Piece{p.x + int64_t(token) * p.x_bytes + i * kPieceBytes, piece_bytes(p.x_bytes, i)};
    };
    const Route route = find_route(p, d, token, lane);
    ring.begin(pieces, lane, source);
    late.hand_in(lane);
    if (!p.again) send_entries(p, d, route, token, lane);
    if (p.scale)
      for (int g = lane; g < p.num_scales; g += kWarp)
        mine->scale[g] = p.scale[token * p.scale_row_stride + g * p.scale_group_stride];
    uint8_t* to = route.row >= 0 ? d.block + d.fields.x + int64_t(route.row) * p.row_bytes : nullptr;
    const auto use = [&](int i, uint8_t* slot) {
      int at = i * kPieceBytes, bytes = piece_bytes(p.x_bytes, i);
      if (p.cast) {
        cast_piece(slot, bytes, mine->scale + at / 256, lane);
        at /= 2, bytes /= 2;
        bulk_fence();
        __syncwarp();
      }
      if (to) bulk_store(to + at, slot, bytes);
      return true;
    };
    ring.finish(pieces, lane, source, use);
    if (p.num_scales) {
      bulk_fence();
      __syncwarp();
      if (to) bulk_store(d.block + d.fields.scale + int64_t(route.row) * scale_bytes(p), mine->scale, scale_bytes(p));
      bulk_commit();
    }
    if (route.item >= 0) late.flag = flag_at(c, c.heap.arrived, lane, epoch, route.item);
  }
  late.close(lane);
}

// ---- receive
// ---------------------------------------------------------------------------------------------------------

struct Items {  // lane r: those of source r
  int first, count;
};

EPRT_DEVICE Items find_items(const DispatchParams& p, int lane) {
  const Context& c = p.context;
  const bool counts = lane < kRanks;
  const int sent = counts ? p.layout.sent[lane * kRanks + c.rank] : 0;
  const int first = sum_below(sent, lane);
  const bool there = counts && !load_relaxed(c.deadline.mask + lane);
  return {first, there ? min(sent, max(0, p.capacity - first)) : 0};
}

// Rows of the item's other experts, from the one that crossed.
EPRT_DEVICE void copy_row(const DispatchParams& p, const Fields& fields, Ring& ring, int item, int lane) {
  uint8_t* block = p.context.peer[p.context.rank] + p.block;
  int row = -1;
  if (lane < p.top_k)
    row = int(load_relaxed(reinterpret_cast<const uint32_t*>(block + fields.entry) + int64_t(item) * p.top_k + lane));
  const uint32_t wanted = __ballot_sync(kAllLanes, row >= 0), others = wanted & (wanted - 1);
  if (!others) return;
  bulk_fence();  // what the flag says is there is next read by bulk copies
  const int first = __ffs(wanted) - 1;
  const int64_t from_row = __shfl_sync(kAllLanes, row, first);
  uint8_t* x = block + fields.x;
  const int pieces = ceil_div(p.row_bytes, kPieceBytes);
  const auto source = [&](int i) {
    return Piece{x + from_row * p.row_bytes + i * kPieceBytes, piece_bytes(p.row_bytes, i)};
  };
  ring.begin(pieces, lane, source);
  const int words = scale_bytes(p) / 4;
  uint32_t* scales = reinterpret_cast<uint32_t*>(block + fields.scale);
  for (uint32_t left = others; left; left &= left - 1) {
    const int64_t to_row = __shfl_sync(kAllLanes, row, __ffs(left) - 1);
    for (int g = lane; g < words; g += kWarp) scales[to_row * words + g] = load_relaxed(scales + from_row * words + g);
  }
  uint8_t* to = (others >> lane) & 1 ? x + int64_t(row) * p.row_bytes : nullptr;
  const auto use = [&](int i, uint8_t* slot) {
    if (to) bulk_store(to + i * kPieceBytes, slot, piece_bytes(p.row_bytes, i));
    return true;
  };
  ring.finish(pieces, lane, source, use);
}

// Sources in turn, position by position: about the order in which items come.
EPRT_DEVICE void receive_rows(const DispatchParams& p, SharedDispatch* shared, const Share& share, Ring& ring,
                              int lane) {
  const Context& c = p.context;
  const Items items = find_items(p, lane);
  const Fields fields = block_fields(p, p.capacity);
  const int most = __reduce_max_sync(kAllLanes, items.count);
  for (int unit = share.index; unit < most * kRanks; unit += share.count) {
    const int source = unit % kRanks, position = unit / kRanks;
    if (position >= __shfl_sync(kAllLanes, items.count, source)) continue;
    const int item = __shfl_sync(kAllLanes, items.first, source) + position;
    const uint32_t* flag = flag_at(c, c.heap.arrived, c.rank, shared->epoch, item);
    const bool arrived = wait_peer(c, &shared->book, flag, shared->epoch, kDispatchTokens, source);
    if (__all_sync(kAllLanes, arrived)) copy_row(p, fields, ring, item, lane);
  }
  bulk_wait_written();
}

EPRT_DEVICE void receive_items(const DispatchParams& p, SharedDispatch* shared, const Share& share, int lane) {
  const Context& c = p.context;
  const Items items = find_items(p, lane);
  const int total = __shfl_sync(kAllLanes, items.first + items.count, kRanks - 1);
  int64_t* entries = reinterpret_cast<int64_t*>(c.peer[c.rank] + p.block);
  for (int first = share.index * kWarp; first < total; first += share.count * kWarp) {
    const int item = first + lane;
    int source = 0;
#pragma unroll
    for (int r = 1; r < kRanks; ++r)
      if (__shfl_sync(kAllLanes, items.first, r) <= item) source = r;
    const int position = item - __shfl_sync(kAllLanes, items.first, source);
    const uint32_t* flag = flag_at(c, c.heap.arrived, c.rank, shared->epoch, min(item, c.max_items - 1));
    if (position < __shfl_sync(kAllLanes, items.count, source) &&
        !wait_peer(c, &shared->book, flag, shared->epoch, kDispatchTokens, source))
      for (int k = 0; k < p.top_k; ++k) entries[int64_t(item) * p.top_k + k] = -1;
    __syncwarp();
  }
  if (!p.fill_tail) return;
  const int64_t end = int64_t(p.capacity) * p.top_k, step = int64_t(share.count) * kWarp;
  for (int64_t i = int64_t(total) * p.top_k + share.index * kWarp + lane; i < end; i += step) entries[i] = -1;
}

EPRT_DEVICE void receive(const DispatchParams& p, SharedDispatch* shared, Ring& ring, int lane) {
  const Share share = share_of(p.grouped ? p.phases : kRecv & p.phases, kRecv);
  if (!share.takes_part) return;
  if (p.grouped)
    receive_rows(p, shared, share, ring, lane);
  else
    receive_items(p, shared, share, lane);
}

// Block 0: tells everyone where their rows for this rank go.
EPRT_DEVICE void tell_places(const DispatchParams& p, uint32_t epoch) {
  const Context& c = p.context;
  if (blockIdx.x != 0 || threadIdx.x >= kRanks || load_relaxed(c.deadline.mask + threadIdx.x)) return;
  tell_place(c, c.heap.dispatch_place, threadIdx.x, epoch, p.block, p.capacity);
}

__global__ void __launch_bounds__(kThreads, 1) dispatch(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ SharedDispatch shared;
  const Context& c = p.context;
  const int lane = threadIdx.x % kWarp;
  SharedWarp* const warps = reinterpret_cast<SharedWarp*>(smem);
  SharedWarp* const mine = warps + threadIdx.x / kWarp;
  const bool moves = threadIdx.x < kWarps * kWarp;
  if (threadIdx.x == 0) {
    if (p.phases & kSend) {
      shared.epoch = take_ticket(c, kDispatchTicket);
      if (blockIdx.x == 0) p.layout.epoch[0] = shared.epoch;
    } else {
      shared.epoch = p.layout.epoch[0];
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
  close_book(c, &shared.book, 0);
  if (kStats && blockIdx.x == 0 && threadIdx.x == 0 && (p.phases & kRecv)) *p.layout.received_ns = global_timer_ns();
}

}  // namespace eprt::normal
