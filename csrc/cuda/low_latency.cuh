// Low-latency mode: parameters and buffer fields shared by low_latency_dispatch.cu and low_latency_combine.cu.
// docs/protocol.md explains every field and why every wait ends; eprt/ep/nvlink/low_latency_layout.py mirrors the
// structs and computes the offsets.
//
// Compile-time constants: HIDDEN (a multiple of 16), TOPK, NUM_RANKS (<= 32), NUM_BUFFERS, FP8 (0, 1), COMBINE_ROWS
// (rows that a token gets back, at most), MESSAGE_BYTES (from one message to the next), PROFILE (0, 1: time stamps),
// STATS (0, 1: counters); NODE_RANKS, OUTBOX_ROWS and LAYERED where ranks are on several nodes (low_latency_wire.cuh).
#pragma once
#include "lines.cuh"
#include "waits.cuh"

// What only kernels between nodes have. A macro: kernels of one node are compiled from the text that they would be.
#ifdef NODE_RANKS
#define EPRT_WIRED(...) __VA_ARGS__
#else
#define EPRT_WIRED(...)
#endif

namespace eprt::low_latency {

constexpr int kHidden = HIDDEN;
constexpr int kTopk = TOPK;
constexpr bool kFp8 = FP8;
constexpr uint32_t kSets = 2 * NUM_BUFFERS;  // of each field in the heap, used in turn
static_assert(kHidden % 16 == 0 && kTopk <= 32, "limits of the low-latency kernels");

constexpr int kThreads = 512;  // threads that move data; low_latency_dispatch has a few more
constexpr int kWarps = kThreads / kWarp;

// ---- a token on the wire --------------------------------------------------------------------------------------------
//
// A message is lines (lines.cuh): of the header, then of the values. Which lines' last lanes hold what:
//   header: entry k's {slot, weight} is half a vector, 2 * kLineVectors entries a line; the first line ends in the
//     combine row, {row, -, -, epoch}. slot: local slot << 16 | index among the source's rows for that slot; -1: on
//     another rank. weight: 0 where combine is told them.
//   values, fp8: a chunk of 8 lines has 7 scale groups; its lines but the last one end in {scale, -, -, epoch}.

constexpr int kScales = ceil_div(kHidden, kScaleGroup);
constexpr int kHeaderEntries = 2 * kLineVectors;
constexpr int kHeaderLines = ceil_div(kTopk, kHeaderEntries);
EPRT_WIRED(constexpr int kEntryRankShift = 26;)  // in a message for a node: of the slot's rank there, above the slot
constexpr int kPayloadVectors = kHidden * (kFp8 ? 1 : 2) / 16;
constexpr int kPayloadLines = ceil_div(kPayloadVectors, kLineVectors);
constexpr int kChunkLines = 8;
constexpr int kChunkVectors = kChunkLines * kLineVectors;
constexpr int kChunkScales = kChunkVectors * 16 / kScaleGroup;
static_assert(kChunkScales * kScaleGroup == kChunkVectors * 16, "a chunk holds whole scale groups");
constexpr int kMessageBytes = MESSAGE_BYTES;  // fp8 and bf16 kernels may share a heap
static_assert(kMessageBytes % kLineBytes == 0 && kMessageBytes >= (kHeaderLines + kPayloadLines) * kLineBytes,
              "a message overlaps the next");

// What entry `lane` has in a header, of which a warp has the first or the second halves of all pairs' words.
EPRT_DEVICE uint32_t of_entry(uint32_t even, uint32_t odd, int lane) {
  const int holder = lane / kHeaderEntries * kLineLanes + lane % kHeaderEntries / 2;
  const uint32_t a = __shfl_sync(kAllLanes, even, holder), b = __shfl_sync(kAllLanes, odd, holder);
  return lane % 2 ? b : a;
}

// ---- combine's rows -------------------------------------------------------------------------------------------------

constexpr int kRowVectors = kHidden / 8;                        // bf16
constexpr int kRowFours = ceil_div(kRowVectors, kFourVectors);  // fours of lines
constexpr int kRowBytes = kRowFours * kWarpLineBytes;
constexpr int kPartFours = 2;  // of a part, a warp's unit of work
constexpr int kRowParts = ceil_div(kRowFours, kPartFours);
constexpr int kRows = COMBINE_ROWS;  // one per expert, or one per rank. Kernels of both kinds may share a heap
// The row that a rank fills: its number or, if there are more ranks than rows, the first k that names it. So a rank's
// row does not change when other ranks' entries are masked between dispatch and combine.
#ifdef NODE_RANKS
constexpr int kNodeRanks = NODE_RANKS;
constexpr int kNodes = kRanks / kNodeRanks;
constexpr bool kLayered = LAYERED;
constexpr int kRowRanks = kLayered ? kNodeRanks : kRanks;  // whose rows are summed in one place; numbered in the node
constexpr bool kRowIsRank = kRowRanks <= kTopk;
static_assert(kRows >= (kTopk < kRowRanks ? kTopk : kRowRanks), "a rank's row lies beyond a token's rows");
#else
constexpr bool kRowIsRank = kRanks <= kTopk;
static_assert(kRows >= (kTopk < kRanks ? kTopk : kRanks), "a rank's row lies beyond a token's rows");
#endif

// ---- parameters -----------------------------------------------------------------------------------------------------

// Fields of the symmetric heap, as byte offsets that are equal on all ranks. Fields exist 2B times, used in turn by
// epoch (B = num_buffers handles in flight). Dispatches and combines are counted by separate epochs.
struct HeapLayout {
  uint64_t count;    // u64 [2B][R][L + W]: epoch << 32 | rows from the source for each local slot; then a bit per token
                     // of the source, W = M / 32 rounded up: it comes here
  uint64_t message;  // [2B][R][M] messages, by the token's index on its source
  uint64_t row;      // [2B][M][kRows] rows of H bf16, in lines
  uint64_t weight;   // u64 [2B][R][M * K, rounded up to even]: epoch << 32 | fp32 bits, if combine is told the weights
  uint64_t begun;    // u32 [R], once: the epoch of the last combine that the rank has begun to send
};

#ifdef NODE_RANKS
// More fields of the heap, see low_latency_wire.cuh. The outbox and the counters are for this rank alone; words are
// written by the rank that puts.
struct WireLayout {
  uint64_t counts;        // outbox: u64 [2B][R][L + W], by holder
  uint64_t messages;      // outbox: [2B][R][M] messages, by holder; LAYERED: [2B][nodes][M], by its node
  uint64_t rows;          // outbox: [2B][R][M][OUTBOX_ROWS] rows, by owner
  uint64_t counts_word;   // u64 [2B][R]: the epoch of the source's counts that are there
  uint64_t message_word;  // u64 [2B][R][M]: of a source's message
  uint64_t row_word;      // u64 [2B][M][kRows]: of a row; LAYERED: [2B][M][nodes], of a node's sum
  uint64_t begun_word;    // u64 [2B][R]: the epoch of the combine that the rank has begun to send
  uint64_t counts_done;   // u64 [R]: epoch << 32 | warps that have written their part of what goes to the rank
  uint64_t message_done;  // u64 [M]: the same of a token
  uint64_t rows_done;     // u64 [R][M]: the same of an owner's token
  // LAYERED (low_latency_layered.cuh), else empty.
  uint64_t inbox;     // [2B][R][M] messages for this rank's node, by source: what the rank is to hand on
  uint64_t shares;    // [2B][R][M][kRows]: rows of this node's ranks for an owner elsewhere, which the rank is to sum
  uint64_t sums;      // [2B][M][nodes]: the sums of other nodes for this rank's tokens
  uint64_t handing;   // u32 [R]: the last dispatch in which the rank has begun to hand on
  uint64_t given_up;  // u32 [R]: the last dispatch in which this source's messages were awaited in vain
  uint64_t agreed;    // u64 [2B]: epoch << 32 | ranks that are masked in that dispatch, see agree_on_mask
  uint64_t crossed;   // u64 [2]: messages, and rows of combines, that this rank has put; not LAYERED alone
};
#endif

struct Context {
  uint8_t* peer[kRanks];  // all ranks' heaps, as mapped here; peer[rank] is our own
  HeapLayout heap;
  Deadline deadline;
  Stats stats;
  uint64_t* ticket;  // [2]: count the thread blocks of all dispatches, of all combines
  uint64_t* stamps;  // [blocks][16], PROFILE only
  int32_t rank;
  int32_t max_tokens;   // M: tokens of a rank, at most
  int32_t num_slots;    // L: slots of a rank
  int32_t num_buffers;  // B: handles in flight
  EPRT_WIRED(WireLayout wire;)
};

// What a dispatch leaves for its combine, in device memory. An item is a token received; its index is
// source * M + position.
struct Handle {
  uint32_t* epoch;        // [2]: epoch of the dispatch, of its last combine
  int32_t* source_items;  // [R]: tokens received from each source
  int32_t* slot_begin;    // [L + 1]: first row of each local slot
  int32_t* item_token;    // [R * M][2]: token's index on its source, combine row
  int32_t* item_row;      // [R * M][K]: row of each entry, or -1
  float* item_weight;     // [R * M][K]
  int32_t* item_left;     // [R * M]: rows not yet computed, for sending tile by tile
  int32_t* row_item;      // [rows]: item of each row
  uint64_t* received_ns;  // [1]: time at which the dispatch was complete
};

enum Phases : int32_t { kSend = 1, kRecv = 2 };

// ---- addresses ------------------------------------------------------------------------------------------------------
//
// Where something for a rank is written, and read by it: in its heap. For a rank of another node: in the outbox.

#ifdef NODE_RANKS
EPRT_DEVICE bool is_beyond(const Context& c, int rank) { return rank / kNodeRanks != c.rank / kNodeRanks; }
EPRT_DEVICE int64_t set_index(uint32_t epoch, int rank) { return int64_t(epoch % kSets) * kRanks + rank; }
EPRT_DEVICE int64_t outbox_index(uint32_t epoch, int holder) {  // of messages
  return kLayered ? int64_t(epoch % kSets) * kNodes + holder / kNodeRanks : set_index(epoch, holder);
}
EPRT_DEVICE uint8_t* outbox_row(const Context& c, int64_t owner, int token, int row) {
  const int64_t first = (owner * c.max_tokens + token) * OUTBOX_ROWS;
  return c.peer[c.rank] + c.wire.rows + (first + (OUTBOX_ROWS == 1 ? 0 : row)) * kRowBytes;
}
// LAYERED: words that follow in counts: W with a bit per token that comes to the holder's node; who hands them on.
EPRT_DEVICE int node_words(const Context& c) { return kLayered ? ceil_div(c.max_tokens, 32) + 1 : 0; }
#endif

EPRT_DEVICE int count_words(const Context& c) {
  return c.num_slots + ceil_div(c.max_tokens, 32) EPRT_WIRED(+node_words(c));
}

EPRT_DEVICE uint64_t* count_at(const Context& c, int holder, uint32_t epoch, int source) {
  const int set = epoch % kSets;
  EPRT_WIRED(if (is_beyond(c, holder)) return reinterpret_cast<uint64_t*>(c.peer[c.rank] + c.wire.counts) +
                 set_index(epoch, holder) * count_words(c);)
  return reinterpret_cast<uint64_t*>(c.peer[holder] + c.heap.count) + int64_t(set * kRanks + source) * count_words(c);
}

EPRT_DEVICE uint8_t* message_at(const Context& c, int holder, uint32_t epoch, int source, int token) {
  const int set = epoch % kSets;
  EPRT_WIRED(if (is_beyond(c, holder)) return c.peer[c.rank] + c.wire.messages +
                 (outbox_index(epoch, holder) * c.max_tokens + token) * kMessageBytes;)
  return c.peer[holder] + c.heap.message + (int64_t(set * kRanks + source) * c.max_tokens + token) * kMessageBytes;
}

EPRT_DEVICE int64_t row_index(const Context& c, uint32_t epoch, int token, int row) {
  return (int64_t(epoch % kSets) * c.max_tokens + token) * kRows + row;
}

EPRT_DEVICE uint8_t* row_at(const Context& c, int holder, uint32_t epoch, int token, int row) {
  EPRT_WIRED(if (is_beyond(c, holder)) return outbox_row(c, set_index(epoch, holder), token, row);)
  return c.peer[holder] + c.heap.row + row_index(c, epoch, token, row) * kRowBytes;
}

EPRT_DEVICE uint64_t* weights_at(const Context& c, int holder, uint32_t epoch, int source) {
  const int set = epoch % kSets, words = ceil_div(c.max_tokens * kTopk, 2) * 2;
  return reinterpret_cast<uint64_t*>(c.peer[holder] + c.heap.weight) + int64_t(set * kRanks + source) * words;
}

EPRT_DEVICE uint32_t* begun_at(const Context& c, int holder, int source) {
  return reinterpret_cast<uint32_t*>(c.peer[holder] + c.heap.begun) + source;
}

// index / per_rank, a rank. Among few ranks comparisons are less code than a division, and code that is not in a cache
// costs time.
EPRT_DEVICE int rank_of(int index, int per_rank) {
  if (kRanks > 8) return index / per_rank;
  int rank = 0;
#pragma unroll
  for (int r = 1; r < min(kRanks, 9); ++r) rank += index >= r * per_rank;
  return rank;
}

// ---- epochs ---------------------------------------------------------------------------------------------------------

// Called by one thread of every block of a sending launch. kind: 0 dispatch, 1 combine.
EPRT_DEVICE uint32_t next_epoch(const Context& c, const Handle& handle, int kind) {
  const uint32_t epoch = take_ticket(c, kind);
  if (blockIdx.x == 0) handle.epoch[kind] = epoch;
  return epoch;
}

// ---- time -----------------------------------------------------------------------------------------------------------

EPRT_DEVICE void stamp(const Context& c, int event, int thread = 0) {
#if PROFILE
  if (threadIdx.x == thread) c.stamps[blockIdx.x * 16 + event] = global_timer_ns();
#endif
}

}  // namespace eprt::low_latency
