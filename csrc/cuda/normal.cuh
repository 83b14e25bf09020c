// Normal mode: parameters and buffer fields shared by normal_count.cu, normal_dispatch.cu and normal_combine.cu.
// docs/protocol.md explains every field and why every wait ends; eprt/ep/nvlink/normal_layout.py mirrors the structs
// and the fields.
//
// Compile-time constants, besides those of waits.cuh: GROUPED (0: one row per item, 1: one row per item and expert),
// EXACT (0: an item's rows are returned as their sum, 1: each separately; only with GROUPED 1).
//
// An item is a received token: one per token and rank that it goes to. Items are numbered by (source rank, token). Rows
// are ordered like items (GROUPED 0) or by (local slot, item, k) (GROUPED 1).
#pragma once
#include "waits.cuh"

namespace eprt::normal {

constexpr bool kGrouped = GROUPED, kExact = EXACT;
constexpr int kMaxTopk = 32;

// ---- parameters -----------------------------------------------------------------------------------------------------

// Fields of the symmetric heap, as byte offsets that are equal on all ranks. Their u64 words are epoch << 32 | value
// and need no fence and no flag.
struct HeapLayout {
  uint64_t count;           // u64 [2B][R][width]: rows for each of the S slots, tokens for each rank, rounds
  uint64_t dispatch_place;  // u64 [2B][R][2]: where our rows go in the peer's heap, in units of 128 bytes; how many fit
  uint64_t combine_place;   // u64 [2B][R][2]: where outputs go, in units of 128 bytes; index of our first one
  uint64_t arrived;         // u32 [B][max_items]: epoch of the dispatch whose item has arrived
  uint64_t returned;        // u32 [B][max_items]: epoch of the combine whose output has arrived
};

enum CallKind : int { kDispatch, kCombine, kCount };

struct Context {
  uint8_t* peer[kRanks];  // all ranks' heaps, as mapped here; peer[rank] is our own
  HeapLayout heap;
  Deadline deadline;
  Stats stats;
  uint64_t* ticket;  // [3], by CallKind: counts thread blocks of all launches, from which epochs follow
  int32_t* done;     // [1]: thread blocks of a count that are done; 0 between launches
  uint32_t* taken;   // units of work that warps of a launch have claimed: taken_at
  int32_t rank;
  int32_t num_buffers;  // B
  int32_t width;        // words of a count, at least S + R + 1
  int32_t max_items;    // items of a call, at most
};

// What a count leaves for dispatch and combine, and a dispatch for combine, in device memory of this rank.
struct Layout {
  uint32_t* epoch;        // [2]: epoch of the dispatch, of the combine
  int32_t* sent;          // [R][R]: tokens from rank i to rank j
  int32_t* sent_through;  // [R][R]: tokens from ranks 0 to i to rank j
  int32_t* base;          // [S + R]: our first row in each slot, and our first item at each rank
  int32_t* chunk_first;   // [chunks][S + R]: how many of our rows and items belong to earlier chunks
  int32_t* rank_index;    // [T][R]: the token's index among those of its chunk for a rank, or -1
  int32_t* slot_index;    // [T][K]: the entry's index among those of its chunk for its slot; EXACT: -1 if left out
  int32_t* position;      // [T][R]: the token's index among all of ours for a rank, or -1
  int32_t* slot_rows;     // [L]: rows received for each local slot
  uint64_t* received_ns;  // [1]: time at which the dispatch was complete
};

enum Phases : int32_t { kSend = 1, kRecv = 2 };

// ---- addresses ------------------------------------------------------------------------------------------------------

EPRT_DEVICE uint64_t* count_at(const Context& c, int holder, uint32_t epoch, int source) {
  const int set = epoch % (2 * c.num_buffers);
  return reinterpret_cast<uint64_t*>(c.peer[holder] + c.heap.count) + int64_t(set * kRanks + source) * c.width;
}

EPRT_DEVICE uint64_t* place_at(const Context& c, uint64_t field, int holder, uint32_t epoch, int about) {
  const int set = epoch % (2 * c.num_buffers);
  return reinterpret_cast<uint64_t*>(c.peer[holder] + field) + (set * kRanks + about) * 2;
}

EPRT_DEVICE uint32_t* flag_at(const Context& c, uint64_t field, int holder, uint32_t epoch, int item) {
  return reinterpret_cast<uint32_t*>(c.peer[holder] + field) + int64_t(epoch % c.num_buffers) * c.max_items + item;
}

EPRT_DEVICE uint32_t* taken_at(const Context& c, CallKind kind, Phases phase, uint32_t epoch) {
  const uint32_t sets = 2 * c.num_buffers;  // [2 phases][2 kinds][2B]
  return c.taken + ((phase == kRecv) * 2 + kind) * sets + epoch % sets;
}

// A block of `capacity` received rows: byte offsets of its fields, multiples of 128.
struct Fields {
  uint64_t entry;   // [capacity][K]: i32 row or -1 (GROUPED), otherwise i64 local slot or -1
  uint64_t weight;  // f32 [capacity][K]
  uint64_t token;   // i32 [capacity]: index on the source rank
  uint64_t scale;   // [capacity][scale_bytes]
  uint64_t x;       // [capacity][row_bytes]
};

EPRT_DEVICE Fields fields_of(uint64_t capacity, int top_k, int entry_bytes, int scale_bytes) {
  const auto padded = [](uint64_t bytes) { return (bytes + 127) / 128 * 128; };
  Fields f;
  f.entry = 0;
  f.weight = padded(capacity * top_k * entry_bytes);
  f.token = f.weight + padded(capacity * top_k * 4);
  f.scale = f.token + padded(capacity * 4);
  f.x = f.scale + padded(capacity * scale_bytes);
  return f;
}

// ---- epochs and places ----------------------------------------------------------------------------------------------
//
// With rows by expert, blocks lie at the same offset and have the same size on all ranks, and the counts say what comes
// from whom, so a sender knows where its rows go. Otherwise each rank says so when its call begins (dispatch_place,
// combine_place); a late rank then delays what others send to third ranks, which measure the others as late.

EPRT_DEVICE uint64_t word(uint32_t epoch, uint32_t value) { return uint64_t(epoch) << 32 | value; }

// Waits until the word holds this epoch; false past the deadline. Little-endian: the epoch is the upper half. One
// 8-byte store wrote both halves, so who sees one sees the other.
EPRT_DEVICE bool wait_word(const Context& c, WaitBook* book, const uint64_t* from, uint32_t epoch, uint32_t code,
                           int peer, uint32_t* value) {
  uint64_t seen = load_relaxed(from);
  if (uint32_t(seen >> 32) != epoch) {
    if (!wait_peer(c, book, reinterpret_cast<const uint32_t*>(from) + 1, epoch, code, peer)) return false;
    seen = load_relaxed(from);
  }
  *value = uint32_t(seen);
  return true;
}

struct Place {
  uint32_t start = 0;   // in units of 128 bytes
  uint32_t number = 0;  // dispatch: rows that fit; combine: index of the first item
  bool known = false;
};

// Where rank `peer` wants what we send it, for the lanes that want to know.
EPRT_DEVICE Place wait_place(const Context& c, WaitBook* book, uint64_t field, uint32_t epoch, uint32_t code, int peer,
                             bool wanted) {
  Place place;
  if (!wanted || load_relaxed(c.deadline.mask + peer)) return place;
  const uint64_t* words = place_at(c, field, c.rank, epoch, peer);
  place.known = wait_word(c, book, words, epoch, code, peer, &place.start) &&
                wait_word(c, book, words + 1, epoch, code, peer, &place.number);
  return place;
}

EPRT_DEVICE void tell_place(const Context& c, uint64_t field, int peer, uint32_t epoch, uint64_t offset,
                            uint32_t number) {
  uint64_t* words = place_at(c, field, peer, epoch, c.rank);
  store_relaxed(words, word(epoch, uint32_t(offset / 128)));
  store_relaxed(words + 1, word(epoch, number));
}

// Exclusive prefix sum over the lanes.
EPRT_DEVICE int sum_below(int value, int lane) {
  int sum = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += below;
  }
  return sum - value;
}

EPRT_DEVICE int read_index(const void* from, int bytes, int64_t i, int64_t limit) {
  const int64_t value = bytes == 8 ? static_cast<const int64_t*>(from)[i] : static_cast<const int32_t*>(from)[i];
  return value >= 0 && value < limit ? int(value) : -1;
}

}  // namespace eprt::normal
