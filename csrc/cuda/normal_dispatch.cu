// Normal-mode dispatch. Send: a token goes once to each rank that has experts of it, by bulk copies directly to its row
// there; if grouped, on this rank to the rows of all its experts. Receive: the rank waits for the items of other ranks
// and, if grouped, copies each item's row to the rows of its other experts.
#include "cast.cuh"
#include "normal_call.cuh"

namespace eprt::normal {

constexpr int kSlots = 2;  // pieces of a warp in shared memory: one arrives while the other leaves

struct DispatchParams {
  Context context;
  Layout layout;
  const uint8_t* x;          // [T] rows of x_bytes
  const uint32_t* scale;     // word (token, g) at token * scale_row_stride + g * scale_group_stride, or null
  const void* topk_slot;     // [T, K] or null
  const float* topk_weight;  // [T, K]
  int64_t scale_row_stride;
  int64_t scale_group_stride;
  uint64_t block;        // this rank's block of received rows: offset in the heap, a multiple of 128
  int32_t capacity;      // rows that the block holds
  int32_t num_tokens;    // T
  int32_t top_k;         // K; 0 without topk_slot
  int32_t num_slots;     // S
  int32_t slot_bytes;    // of one topk_slot: 4 or 8
  int32_t chunk_tokens;  // as in the count
  int32_t x_bytes;       // of a token's values at the source
  int32_t row_bytes;     // of a received row; half of x_bytes with a cast
  int32_t num_scales;    // words per row; 0: none
  int32_t cast;          // from bf16 to fp8 with a scale per 128 values
  int32_t again;         // another batch of the same layout: `position` is known; entries, weights, tokens are not sent
  int32_t fill_tail;     // entries beyond the received items become -1
  int32_t tentative;     // launched before the host knew the counts: does nothing if the block is too small
  int32_t phases;        // Phases
  int32_t piece_bytes;   // bytes of x that pass through shared memory at once: a row if it fits; a multiple of 512
  Division division;
};

struct SharedDispatch {
  Call call;
  uint64_t full[kWarps][2][kSlots];  // of a warp's ring for sending, for receiving
};

EPRT_DEVICE int scale_bytes(const DispatchParams& p) { return ceil_div(p.num_scales * 4, 16) * 16; }

EPRT_DEVICE Fields block_fields(const DispatchParams& p, uint64_t capacity) {
  return fields_of(capacity, p.top_k, kGrouped ? 4 : 8, scale_bytes(p));
}

// Room for a token's scales, where dispatch computes them, behind a piece of its row.
EPRT_DEVICE int scale_room(const DispatchParams& p) { return p.cast ? ceil_div(scale_bytes(p), 128) * 128 : 0; }

// Shared memory of a warp; eprt/ep/nvlink/normal_grid.py computes the same.
EPRT_DEVICE int warp_bytes(const DispatchParams& p) { return kSlots * (p.piece_bytes + scale_room(p)); }

// ---- send -----------------------------------------------------------------------------------------------------------

struct Destination {         // lane r: rank r
  uint8_t* block = nullptr;  // where its block of rows is; null: nothing is sent there
  Fields fields;             // of the block
  int capacity = 0;          // rows that the block holds
};

EPRT_DEVICE Destination find_destination(const DispatchParams& p, SharedDispatch* shared, int lane) {
  const Context& c = p.context;
  Destination d;
  const bool wanted = lane < kRanks && p.layout.sent[c.rank * kRanks + lane] > 0;
  Place place{uint32_t(p.block / 128), uint32_t(p.capacity), wanted && !load_relaxed(c.deadline.mask + lane)};
  if (!kGrouped)
    place = wait_place(c, &shared->call.book, c.heap.dispatch_place, shared->call.epoch, kDispatchPlace, lane, wanted);
  if (!place.known) return d;
  d.block = c.peer[lane] + uint64_t(place.start) * 128;
  d.capacity = place.number;
  d.fields = block_fields(p, place.number);
  return d;
}

// A token's values whose loads depend on no other load. They are kept as loaded: examining them would wait for the
// loads.
struct Entry {
  int index;          // lane r: the token's index among those of its chunk for rank r (again: of all chunks), or -1
  int before;         // lane r: tokens of earlier chunks for rank r
  int slot[2];        // lane k: the entry's 4 or 8 bytes
  int in_slot;        // lane k: the entry's index among those of its chunk for its slot
  int first_row = 0;  // lane k, from read_rows on: our first row in the entry's slot
  int earlier = 0;    // lane k, from read_rows on: our rows of earlier chunks in that slot
  float weight;       // lane k
};

EPRT_DEVICE Entry read_entry(const DispatchParams& p, int token, int lane) {
  const Layout& l = p.layout;
  Entry entry{-1, 0, {-1, -1}};
  if (token >= p.num_tokens) return entry;
  if (lane < kRanks) {
    const int64_t i = int64_t(token) * kRanks + lane;
    entry.index = p.again ? l.position[i] : l.rank_index[i];
    if (!p.again)
      entry.before = l.chunk_first[int64_t(token / p.chunk_tokens) * (p.num_slots + kRanks) + p.num_slots + lane];
  }
  if (lane < p.top_k) {
    const int64_t i = int64_t(token) * p.top_k + lane;
    const int* slot = static_cast<const int*>(p.topk_slot) + i * (p.slot_bytes / 4);
    entry.slot[0] = slot[0];
    if (p.slot_bytes == 8) entry.slot[1] = slot[1];
    entry.weight = p.topk_weight[i];
    if (kGrouped) entry.in_slot = l.slot_index[i];
  }
  return entry;
}

EPRT_DEVICE int slot_of(const DispatchParams& p, const Entry& entry) {
  const bool valid = entry.slot[0] < p.num_slots && (p.slot_bytes == 4 || entry.slot[1] == 0);
  return valid ? max(entry.slot[0], -1) : -1;
}

// Loads that depend on those of read_entry: the rows of the token's slots.
EPRT_DEVICE void read_rows(const DispatchParams& p, Entry* entry, int token, int lane) {
  const int slot = slot_of(p, *entry);
  if (!kGrouped || token >= p.num_tokens || lane >= p.top_k || slot < 0) return;
  entry->first_row = p.layout.base[slot];
  entry->earlier = p.layout.chunk_first[int64_t(token / p.chunk_tokens) * (p.num_slots + kRanks) + slot];
}

struct Route {   // of one token
  int item;      // lane r: the item's number at rank r, or -1: not sent there
  int row;       // lane r: the row that is sent to rank r; kGrouped: -1 for this rank
  int slot;      // lane k: entry, or -1
  int slot_row;  // lane k: the entry's row, or -1 if it does not fit
  int own_row;   // lane k: the same if it is on this rank, else -1; kGrouped
  float weight;  // lane k
};

// first_item: lane r: our first item at rank r.
EPRT_DEVICE Route find_route(const DispatchParams& p, const Destination& d, const Entry& entry, int token,
                             int first_item, int lane) {
  const int slots_per_rank = p.num_slots / kRanks;
  const int rank = p.context.rank;
  Route route{-1, -1, slot_of(p, entry), -1, -1, entry.weight};
  if (lane < kRanks) {
    int position = entry.index < 0 ? -1 : entry.index + entry.before;
    if (position >= 0 && d.block) route.item = first_item + position;
    if (route.item >= d.capacity) {  // left out, also by combine
      report(p.context.deadline.failure, kOverflow, lane, route.item + 1, d.capacity);
      route.item = position = -1;
    }
    if (!p.again) p.layout.position[int64_t(token) * kRanks + lane] = position;
    route.row = route.item;
  }
  if (!kGrouped) return route;
  if (route.slot >= 0) route.slot_row = entry.first_row + entry.earlier + entry.in_slot;
  const int holder = route.slot < 0 ? -1 : route.slot / slots_per_rank;
  const int capacity = __shfl_sync(kAllLanes, d.capacity, max(holder, 0));
  if (route.slot_row >= capacity) {
    if (capacity > 0) report(p.context.deadline.failure, kOverflow, holder, route.slot_row + 1, capacity);
    route.slot_row = -1;
    if (kExact) p.layout.slot_index[int64_t(token) * p.top_k + lane] = -1;  // no output will be returned for it
  }
  const bool own_item = __shfl_sync(kAllLanes, route.item, rank) >= 0;
  if (holder == rank && own_item) route.own_row = route.slot_row;
  // The row that is sent to another rank is that of the token's first expert there.
  route.row = -1;
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    const uint32_t here = __ballot_sync(kAllLanes, holder == r && route.slot_row >= 0);
    const int row = __shfl_sync(kAllLanes, route.slot_row, here ? __ffs(here) - 1 : 0);
    if (lane == r && r != rank && route.item >= 0 && here) route.row = row;
  }
  return route;
}

// Sends what accompanies the row: experts, weights, the token's index.
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
    if (kGrouped)
      reinterpret_cast<int32_t*>(block)[i] = here ? route.slot_row : -1;
    else
      reinterpret_cast<int64_t*>(block)[i] = here ? route.slot - r * slots_per_rank : -1;
    reinterpret_cast<float*>(block + weight)[i] = here ? route.weight : 0.f;
  }
}

// Casts a piece from bf16 to fp8 in place: a step writes below what later steps read.
EPRT_DEVICE void cast_piece(uint8_t* slot, int bytes, uint32_t* scale, int lane) {
  for (int at = lane * 32; at - lane * 32 < bytes; at += kWarp * 32) {
    Unit unit = {};
    if (at < bytes)
      unit = {*reinterpret_cast<const Vec16*>(slot + at), *reinterpret_cast<const Vec16*>(slot + at + 16)};
    float s;
    const Vec16 values = quantize(unit, false, &s);
    __syncwarp();
    if (at < bytes) *reinterpret_cast<Vec16*>(slot + at / 2) = values;
    if (at < bytes && lane % 8 == 0) scale[at / 256] = __float_as_uint(s);
    __syncwarp();
  }
}

// Where one of a token's rows goes, here or on another rank.
struct RowPlace {
  uint8_t* x = nullptr;  // null: nowhere
  uint8_t* scale;
};

EPRT_DEVICE RowPlace place_row(const DispatchParams& p, uint8_t* block, const Fields& fields, int64_t row) {
  if (row < 0) return {};
  return {block + fields.x + row * p.row_bytes, block + fields.scale + row * scale_bytes(p)};
}

// Sends a token's scales: the caller's, or those that the cast left in `cast`. place: of every lane.
EPRT_DEVICE void send_scales(const DispatchParams& p, const RowPlace& place, const uint32_t* cast, int token,
                             int lane) {
  constexpr int kBatch = 4;
  for (int first = lane; first - lane < p.num_scales; first += kBatch * kWarp) {
    uint32_t word[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int g = first + i * kWarp;
      if (g < p.num_scales) word[i] = p.cast ? cast[g] : p.scale[token * p.scale_row_stride + g * p.scale_group_stride];
    }
    for (uint32_t left = __ballot_sync(kAllLanes, place.x != nullptr); left; left &= left - 1) {
      uint32_t* to = reinterpret_cast<uint32_t*>(pointer_of(place.scale, __ffs(left) - 1));
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (first + i * kWarp < p.num_scales) to[first + i * kWarp] = word[i];
    }
  }
}

// slots: this warp's shared memory: kSlots pieces and, for a cast, a token's scales.
EPRT_DEVICE void send(const DispatchParams& p, SharedDispatch* shared, uint8_t* slots, int lane) {
  const Context& c = p.context;
  const Share share = share_of(p.division, p.phases, kSend);
  if (!share.takes_part) return;
  const int warp = threadIdx.x / kWarp, pieces = ceil_div(p.x_bytes, p.piece_bytes);
  Ring<kSlots> ring(slots, shared->full[warp][0], p.piece_bytes, lane);
  uint32_t* const cast = reinterpret_cast<uint32_t*>(slots + kSlots * p.piece_bytes);
  const auto bytes_of = [&](int piece) { return min(p.piece_bytes, p.x_bytes - piece * p.piece_bytes); };
  Turns turns(c, kDispatch, kSend, shared->call.epoch, share, lane);
  static_assert(kSlots < Turns::kKnown, "what is loaded ahead belongs to one of the known tokens");
  int turn_ahead = 0, piece_ahead = 0;
  const auto load_ahead = [&] {
    const int token = turn_ahead == 0 ? turns.number[0] : turns.after(turn_ahead);
    if (token >= p.num_tokens) return;
    const uint8_t* from = p.x + int64_t(token) * p.x_bytes + piece_ahead * p.piece_bytes;
    ring.load(from, bytes_of(piece_ahead), lane);
    if (++piece_ahead == pieces) piece_ahead = 0, ++turn_ahead;
  };
  for (int i = 0; i < kSlots; ++i) load_ahead();
  Entry next = read_entry(p, turns.number[0], lane);
  Entry after = read_entry(p, turns.number[1], lane);
  read_rows(p, &next, turns.number[0], lane);
  const Destination d = find_destination(p, shared, lane);
  const Fields own_fields = block_fields(p, p.capacity);
  const int first_item = lane < kRanks ? p.layout.base[p.num_slots + lane] : 0;
  Flags late{{shared->call.desk + warp}};
  for (; turns.number[0] < p.num_tokens; turns.step(lane), --turn_ahead) {
    const int token = turns.number[0];
    const Route route = find_route(p, d, next, token, first_item, lane);
    next = after;  // these loads are used one and two tokens later
    read_rows(p, &next, turns.number[1], lane);
    after = read_entry(p, turns.number[2], lane);
    const RowPlace there = place_row(p, d.block, d.fields, route.row);
    const RowPlace here = place_row(p, c.peer[c.rank] + p.block, own_fields, route.own_row);
    const auto send_all_scales = [&] {
      send_scales(p, there, cast, token, lane);
      if (kGrouped) send_scales(p, here, cast, token, lane);
    };
    for (int piece = 0; piece < pieces; ++piece) {
      uint8_t* slot = ring.take();
      int at = piece * p.piece_bytes, bytes = bytes_of(piece);
      if (p.cast) {
        cast_piece(slot, bytes, cast + at / 256, lane);
        at /= 2, bytes /= 2;
        bulk_fence_shared();
        __syncwarp();
      }
      if (kGrouped) copy_piece(here.x ? here.x + at : nullptr, slot, bytes, lane);
      store_piece(there.x ? there.x + at : nullptr, slot, bytes, lane);
      if (piece == 0 && !p.again) send_entries(p, d, route, token, lane);
      if (piece == 0 && !p.cast) send_all_scales();
      bulk_wait_read<0>();  // then the slot may be written again
      __syncwarp();
      load_ahead();
    }
    if (p.cast) send_all_scales();
    const bool raised = route.item >= 0 && !(kGrouped && lane == c.rank);  // own rows: nobody waits for them
    late.add(raised ? flag_at(c, c.heap.arrived, lane, shared->call.epoch, route.item) : nullptr, pieces, lane);
  }
  late.close(lane);
}

// ---- receive --------------------------------------------------------------------------------------------------------

struct Items {       // lane r: items of source r
  int first, count;  // number of the first one; how many
};

// Includes items of a rank that was masked after the count: some may have arrived, the others are marked as missing.
EPRT_DEVICE Items find_items(const DispatchParams& p, int lane) {
  const int sent = lane < kRanks ? p.layout.sent[lane * kRanks + p.context.rank] : 0;
  const int first = sum_below(sent, lane);
  return {first, min(sent, max(0, p.capacity - first))};
}

// A warp that receives rows by expert: waits for the items of other ranks and copies each item's row from that of its
// first expert, to which it was sent, to those of the others. Sources in turn: the expected order of arrival.
struct FanOut {
  const DispatchParams& p;
  SharedDispatch* shared;
  int lane;
  Items items;
  Fields fields;
  uint8_t* block;
  int end;  // turns are numbered below end; sources with fewer items than others leave some turns without an item

  EPRT_DEVICE FanOut(const DispatchParams& p, SharedDispatch* shared, int lane)
      : p(p),
        shared(shared),
        lane(lane),
        items(find_items(p, lane)),
        fields(block_fields(p, p.capacity)),
        block(p.context.peer[p.context.rank] + p.block) {
    end = (kRanks - 1) * __reduce_max_sync(kAllLanes, lane == p.context.rank ? 0 : items.count);
  }

  // The item of a turn; its source in *source. -1: none.
  EPRT_DEVICE int item_of(int number, int* source) const {
    constexpr int kOthers = kRanks > 1 ? kRanks - 1 : 1;
    *source = (p.context.rank + 1 + number % kOthers) % kRanks;
    const int position = number / kOthers;
    if (number >= end || position >= __shfl_sync(kAllLanes, items.count, *source)) return -1;
    return __shfl_sync(kAllLanes, items.first, *source) + position;
  }

  // Lane k: the row of entry k of a turn's item, or -1; all -1 if there is nothing to copy. wait: until the item is
  // there; else false if it is not.
  EPRT_DEVICE bool find_rows(int number, bool wait, int* row) const {
    const Context& c = p.context;
    int source;
    const int item = item_of(number, &source);
    *row = -1;
    if (item < 0) return true;
    bool arrived = false;
    if (lane == 0) {
      const uint32_t epoch = shared->call.epoch, *flag = flag_at(c, c.heap.arrived, c.rank, epoch, item);
      arrived = wait ? wait_peer(c, &shared->call.book, flag, epoch, kDispatchTokens, source)
                     : load_acquire_sys(flag) == epoch;
    }
    arrived = __shfl_sync(kAllLanes, arrived, 0);
    __syncwarp();  // orders the acquire before the loads of all lanes
    if (!arrived) return wait;
    bulk_fence_global();  // orders it before the bulk copies that read the row
    const uint32_t* entries = reinterpret_cast<const uint32_t*>(block + fields.entry) + int64_t(item) * p.top_k;
    if (lane < p.top_k) *row = int(load_relaxed(entries + lane));
    const uint32_t wanted = __ballot_sync(kAllLanes, *row >= 0);
    if (!(wanted & (wanted - 1))) *row = -1;
    return true;
  }

  // While an item's row leaves shared memory, that of a later one arrives.
  EPRT_DEVICE void copy_rows(Turns turns, uint8_t* slots) const {
    const int piece_bytes = p.piece_bytes, pieces = ceil_div(p.row_bytes, piece_bytes);
    Ring<kSlots> ring(slots, shared->full[threadIdx.x / kWarp][1], piece_bytes + scale_room(p), lane);
    const auto bytes_of = [&](int piece) { return min(piece_bytes, p.row_bytes - piece * piece_bytes); };
    int row[Turns::kKnown];               // find_rows of the first `known` turns
    int known = 0, held = 0;              // held: slots that are being filled or read
    int turn_ahead = 0, piece_ahead = 0;  // the next piece to load
    const auto find_next = [&] {
      if (known == 1 && find_rows(turns.number[1], false, row + 1))
        known = 2;
      else if (known == 2 && find_rows(turns.number[2], false, row + 2))
        known = 3;
    };
    const auto load_ahead = [&] {
      while (held < kSlots && turn_ahead < known) {
        const int mine = turn_ahead == 0 ? row[0] : turn_ahead == 1 ? row[1] : row[2];
        const uint32_t wanted = __ballot_sync(kAllLanes, mine >= 0);
        if (wanted) {
          const int64_t from = __shfl_sync(kAllLanes, mine, __ffs(wanted) - 1);
          const int scales = piece_ahead == 0 ? scale_bytes(p) : 0;
          ring.load(block + fields.x + from * p.row_bytes + piece_ahead * piece_bytes, bytes_of(piece_ahead), lane,
                    block + fields.scale + from * scale_bytes(p), scales, piece_bytes);
          ++held;
          if (++piece_ahead < pieces) continue;
        }
        piece_ahead = 0, ++turn_ahead;
      }
    };
    for (; turns.number[0] < end; turns.step(lane)) {
      if (known == 0) find_rows(turns.number[0], true, row), known = 1;
      load_ahead();
      const uint32_t wanted = __ballot_sync(kAllLanes, row[0] >= 0);
      const bool copied = row[0] >= 0 && lane != __ffs(wanted) - 1;
      const RowPlace to = place_row(p, block, fields, copied ? row[0] : -1);
      for (int piece = 0; wanted && piece < pieces; ++piece) {
        const uint8_t* slot = ring.take();
        if (piece == 0 && p.num_scales) copy_piece(to.x ? to.scale : nullptr, slot + piece_bytes, scale_bytes(p), lane);
        store_piece(to.x ? to.x + piece * piece_bytes : nullptr, slot, bytes_of(piece), lane);
        find_next();
        bulk_wait_read<0>();  // then the slot may be written again
        __syncwarp();
        --held;
        load_ahead();
      }
      row[0] = row[1], row[1] = row[2];
      --known, --turn_ahead;
    }
    bulk_wait_written<0>();
  }
};

// One row per item: waits for items; entries of those that do not arrive become -1.
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
    const uint32_t* flag = flag_at(c, c.heap.arrived, c.rank, shared->call.epoch, min(item, c.max_items - 1));
    if (position < __shfl_sync(kAllLanes, items.count, source) &&
        !wait_peer(c, &shared->call.book, flag, shared->call.epoch, kDispatchTokens, source))
      for (int k = 0; k < p.top_k; ++k) entries[int64_t(item) * p.top_k + k] = -1;
    __syncwarp();
  }
  if (!p.fill_tail) return;
  const int64_t end = int64_t(p.capacity) * p.top_k, step = int64_t(share.count) * kWarp;
  for (int64_t i = int64_t(total) * p.top_k + share.index * kWarp + lane; i < end; i += step) entries[i] = -1;
}

EPRT_DEVICE void receive(const DispatchParams& p, SharedDispatch* shared, uint8_t* slots, int lane) {
  if (!(p.phases & kRecv)) return;
  if (kGrouped) {
    if (threadIdx.x / kWarp >= p.division.recv_warps) return;  // a warp without shared memory
    const Share share = share_of(p.division, p.phases, kRecv);
    const FanOut fan_out(p, shared, lane);
    fan_out.copy_rows(Turns(p.context, kDispatch, kRecv, shared->call.epoch, share, lane), slots);
    return;
  }
  // Little work, and it can start only after peers have sent, so the sending warps do it last.
  const int32_t phase = p.phases & kSend ? kSend : kRecv;
  const Share share = share_of(p.division, phase, phase);
  if (share.takes_part) receive_items(p, shared, share, lane);
}

// Whether the block of rows is large enough: the same result in all warps of a launch, and as the host gets it from the
// count.
EPRT_DEVICE bool holds_all(const DispatchParams& p, int lane) {
  const int items = lane < kRanks ? p.layout.sent[lane * kRanks + p.context.rank] : 0;
  return __reduce_add_sync(kAllLanes, items) <= p.capacity;
}

__global__ void __launch_bounds__(kThreads, 1) dispatch(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ SharedDispatch shared;
  const Context& c = p.context;
  const int lane = threadIdx.x % kWarp;
  if (p.tentative && !holds_all(p, lane)) return;
  const auto tell_places = [&] {
    if (!kGrouped && threadIdx.x < kRanks && !load_relaxed(c.deadline.mask + threadIdx.x))
      tell_place(c, c.heap.dispatch_place, threadIdx.x, shared.call.epoch, p.block, p.capacity);
  };
  const auto move = [&](int warp) {
    uint8_t* slots = smem + warp * warp_bytes(p);
    send(p, &shared, slots, lane);
    receive(p, &shared, slots, lane);
  };
  run_call(p, kDispatch, &shared.call, tell_places, move);
  if (kStats && blockIdx.x == p.division.send_blocks && threadIdx.x == 0 && (p.phases & kRecv))
    *p.layout.received_ns = global_timer_ns();
}

}  // namespace eprt::normal
