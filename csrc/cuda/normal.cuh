// Normal mode: parameters and buffer fields shared by normal_count.cu, normal_dispatch.cu and normal_combine.cu.
// docs/protocol.md explains every field and why no wait is for ever; eprt/ep/nvlink/normal_layout.py mirrors the
// structs and the fields.
//
// Compile-time constants, beside those of waits.cuh: GROUPED (0: a row is an item, 1: an item's for one of its
// experts), EXACT (0: an item's rows come back as their sum, 1: each by itself; with GROUPED 1).
//
// An item is a token received: one per (token, rank it goes to). Items are numbered by (source rank, token). A received
// row is an item's (`grouped` 0), or one of an item's experts' (`grouped` 1: rows by local slot, then item, then k).
#pragma once
#include "waits.cuh"

namespace eprt::normal {

constexpr bool kGrouped = GROUPED, kExact = EXACT;
constexpr int kMaxTopk = 32;

// ---- parameters
// ------------------------------------------------------------------------------------------------------

// Symmetric heap, the part at byte offsets equal on all ranks. Words are epoch << 32 | value: no fence, no flag.
struct HeapLayout {
  uint64_t count;           // u64 [2B][R][width]: rows for each of the S slots, tokens for each rank, rounds
  uint64_t dispatch_place;  // u64 [2B][R][2]: where in the peer's heap our rows go, in 128 bytes; how many fit
  uint64_t combine_place;   // u64 [2B][R][2]: where outputs go, in 128 bytes; the first of ours there
  uint64_t arrived;         // u32 [B][max_items]: epoch of the dispatch whose item is there
  uint64_t returned;        // u32 [B][max_items]: epoch of the combine whose output is there
};

enum Verb : int { kDispatch, kCombine, kCount };

struct Context {
  uint8_t* peer[kRanks];  // heap bases as mapped here; peer[rank] is our own
  HeapLayout heap;
  Deadline deadline;
  Stats stats;
  uint64_t* ticket;  // [3], by Verb: counts thread blocks of all calls: their epochs, without any host parameter
  int32_t* done;     // [1]: thread blocks of a count that are done; between launches 0
  uint32_t* taken;   // [2][2], by Verb and epoch % 2: pieces of sending work that warps of a launch took
  int32_t rank;
  int32_t num_buffers;  // B
  int32_t width;        // words of a count, at least S + R + 1
  int32_t max_items;
};

// What a count leaves for dispatch and combine, and dispatch for combine. Device memory of this rank.
struct Layout {
  uint32_t* epoch;        // [2]: of the dispatch, of the combine
  int32_t* sent;          // [R][R]: tokens from rank i to rank j
  int32_t* sent_through;  // [R][R]: tokens from ranks 0 to i to rank j
  int32_t* base;          // [S + R]: first row of each slot, and first item of each rank, for our tokens there
  int32_t* chunk_first;   // [chunks][S + R]: of those, how many belong to earlier chunks
  int32_t* rank_index;    // [T][R]: the token's place among those of its chunk for a rank, or -1
  int32_t* slot_index;    // [T][K]: the entry's place among those of its chunk for its slot; EXACT: -1 if left out
  int32_t* position;      // [T][R]: the token's place among all of ours for a rank, or -1
  int32_t* slot_rows;     // [L]: rows received for each local slot
  uint64_t* received_ns;  // [1]: when the dispatch was complete
};

enum Phases : int32_t { kSend = 1, kRecv = 2 };

// ---- addresses
// -------------------------------------------------------------------------------------------------------

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

EPRT_DEVICE uint32_t* taken_at(const Context& c, Verb verb, uint32_t epoch) { return c.taken + verb * 2 + epoch % 2; }

// A block of received rows, for `capacity` of them; fields one after another, each at a multiple of 128.
struct Fields {
  uint64_t entry;   // [capacity][K]: i32 row or -1 (grouped), else i64 local slot or -1
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

// ---- epochs and places
// ------------------------------------------------------------------------------
//
// Grouped, blocks lie at the same offset on all ranks and hold as much, and counts say what comes from whom: a sender
// knows where its rows go. Else each rank says so when its call begins (dispatch_place, combine_place), and one that is
// late holds up what others send to third ranks, who take those for late.

EPRT_DEVICE uint64_t word(uint32_t epoch, uint32_t value) { return uint64_t(epoch) << 32 | value; }

// The word once it carries this epoch; false past the deadline. Little-endian: the epoch is the upper half; one 8-byte
// store wrote both, so that seeing one is seeing the other.
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
  uint32_t start = 0;   // in 128 bytes
  uint32_t number = 0;  // dispatch: rows that fit; combine: first item
  bool known = false;
};

// Where rank `peer` wants what we send it, for the lanes that ask.
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
