// Low-latency mode between nodes. What goes to a rank of another node is first laid out in this rank's own heap, in the
// outbox, just as it will lie there (message_at, row_at and count_at name that place). The warp that finishes a
// message, a row or the counts puts it, with a word that has the epoch; who wants to read it first awaits the word.
// Inside the node all is as without.
//
// Compile-time constants, besides those of low_latency.cuh: NODE_RANKS, ranks of each node, in order; OUTBOX_ROWS, rows
// that the outbox has for a token: top-k if EXACT and not LAYERED, else 1; LAYERED (0, 1: see low_latency_layered.cuh).
// Kernels of one node are compiled without them, and nothing
// of this file is in them (tests/unit/gpu/test_wire_kernels.py).
#pragma once
#include "low_latency.cuh"

#ifdef NODE_RANKS
#include "wire.cuh"

namespace eprt::low_latency {

static_assert(kRanks % kNodeRanks == 0, "nodes have equally many ranks");

// A bit for each rank of another node.
EPRT_DEVICE uint32_t ranks_beyond(const Context& c) {
  const uint32_t node = (kNodeRanks == 32 ? 0u : 1u << kNodeRanks) - 1, all = (kRanks == 32 ? 0u : 1u << kRanks) - 1;
  return all & ~(node << c.rank / kNodeRanks * kNodeRanks);
}

// ---- words that are put ---------------------------------------------------------------------------------------------

EPRT_DEVICE uint64_t* own_words(const Context& c, uint64_t field) {
  return reinterpret_cast<uint64_t*>(c.peer[c.rank] + field);
}
EPRT_DEVICE uint64_t* counts_word(const Context& c, uint32_t epoch, int source) {
  return own_words(c, c.wire.counts_word) + set_index(epoch, source);
}
EPRT_DEVICE uint64_t* message_word(const Context& c, uint32_t epoch, int source, int token) {
  return own_words(c, c.wire.message_word) + set_index(epoch, source) * c.max_tokens + token;
}
EPRT_DEVICE uint64_t* row_word(const Context& c, uint32_t epoch, int token, int row) {
  return own_words(c, c.wire.row_word) + row_index(c, epoch, token, row);
}
EPRT_DEVICE uint64_t* begun_word(const Context& c, uint32_t epoch, int source) {
  return own_words(c, c.wire.begun_word) + set_index(epoch, source);
}

// Little-endian: the lower half of a word, which holds the epoch.
EPRT_DEVICE const uint32_t* epoch_of(const uint64_t* word) { return reinterpret_cast<const uint32_t*>(word); }

// Called by a warp for what it has put. kind: 0 a message, 1 a row of a combine.
EPRT_DEVICE void count_crossing(const Context& c, int kind, int lane) {
  if (kStats && lane == 0) add_to_total(own_words(c, c.wire.crossed) + kind, uint64_t(1));
}

// ---- send -----------------------------------------------------------------------------------------------------------

// A placing warp has written all its words for all ranks, of `warps` that do so.
EPRT_DEVICE void ship_counts(const Context& c, uint32_t masked, uint32_t epoch, int warps, int lane) {
  for (uint32_t left = ranks_beyond(c); left; left &= left - 1) {
    const int r = __ffs(left) - 1;
    if (!is_last_warp(own_words(c, c.wire.counts_done) + r, epoch, warps, lane) || (masked >> r) & 1) continue;
    eprt_wire_put(count_at(c, c.rank, epoch, c.rank), count_at(c, r, epoch, c.rank), count_words(c) * 8,
                  counts_word(c, epoch, c.rank), epoch, r);
  }
}

// A warp has written its part of a token's message to these ranks, of `warps` that do so.
EPRT_DEVICE void ship_message(const Context& c, uint32_t ranks, uint32_t epoch, int token, int warps, int lane) {
  if (!is_last_warp(own_words(c, c.wire.message_done) + token, epoch, warps, lane)) return;
  for (uint32_t left = ranks & ranks_beyond(c); left; left &= left - 1) {
    const int r = __ffs(left) - 1;
    eprt_wire_put(message_at(c, c.rank, epoch, c.rank, token), message_at(c, r, epoch, c.rank, token),
                  (kHeaderLines + kPayloadLines) * kLineBytes, message_word(c, epoch, c.rank, token), epoch, r);
    count_crossing(c, 0, lane);
  }
}

// The row to a token's owner is written.
EPRT_DEVICE void ship_row(const Context& c, int owner, uint32_t epoch, int token, int row) {
  __syncwarp();
  eprt_wire_put(row_at(c, c.rank, epoch, token, row), row_at(c, owner, epoch, token, row), kRowBytes,
                row_word(c, epoch, token, row), epoch, owner);
  count_crossing(c, 1, threadIdx.x % kWarp);
}

// Whether this warp is the last to have written a part of what goes to the owner of the token.
EPRT_DEVICE bool completes_rows(const Context& c, int owner, uint32_t epoch, int token, int lane) {
  return is_last_warp(own_words(c, c.wire.rows_done) + owner * c.max_tokens + token, epoch, kRowParts, lane);
}

// ---- receive --------------------------------------------------------------------------------------------------------

// A thread for each source.
EPRT_DEVICE void await_counts(const Context& c, WaitBook* book, uint32_t epoch, uint32_t masked, int thread) {
  if (thread >= kRanks || !is_beyond(c, thread) || (masked >> thread) & 1) return;
  uint64_t* word = counts_word(c, epoch, thread);
  if (wait_peer(c, book, epoch_of(word), epoch, kDispatchCounts, thread)) eprt_wire_see(word, epoch);
}

// Waits until what was put with the word is there; false if its sender is masked or late. Called by all lanes of a
// warp, with the same result in all.
EPRT_DEVICE bool await_word(const Context& c, WaitBook* book, uint64_t* word, uint32_t epoch, uint32_t code, int peer,
                            int lane) {
  if (!is_beyond(c, peer)) return true;
  uint32_t seen = load_acquire_sys(epoch_of(word));
  bool there = __all_sync(kAllLanes, seen == epoch);
  const uint64_t start = there ? 0 : global_timer_ns();
  for (int look = 1; !there; ++look) {
    const uint64_t now = global_timer_ns();  // before the look, see WaitEnd
    seen = load_acquire_sys(epoch_of(word));
    there = __all_sync(kAllLanes, seen == epoch);
    if (!there && look % 64) continue;
    const uint32_t seen_first = __shfl_sync(kAllLanes, seen, 0);
    const PeerState state = judge_peer(c.deadline, book, peer, there, start, now, code, seen_first, epoch);
    if (state == kMasked || state == kLate) return false;
  }
  if (lane == 0) eprt_wire_see(word, epoch);
  __syncwarp();
  return true;
}

EPRT_DEVICE bool await_message(const Context& c, WaitBook* book, uint32_t epoch, int source, int token, int lane) {
  return await_word(c, book, message_word(c, epoch, source, token), epoch, kDispatchTokens, source, lane);
}

EPRT_DEVICE bool await_row(const Context& c, WaitBook* book, uint32_t epoch, int holder, int token, int row, int lane) {
  return await_word(c, book, row_word(c, epoch, token, row), epoch, kCombineRows, holder, lane);
}

}  // namespace eprt::low_latency
#endif
