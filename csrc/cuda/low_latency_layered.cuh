// Low-latency mode between nodes in two layers (LAYERED): a token crosses once to each node that it goes to, to the
// rank there that the source has named. That rank hands it on to its node's ranks, and sums their outputs into the one
// row that crosses back. low_latency_hand_on.cuh and low_latency_node_sum.cuh do so; here is what both need.
//
// A source names, for each node, the rank with its own number in the node or, while that one is masked, the next one
// that is not. It tells all ranks of the node with the counts, so nobody there has to know the source's mask.
#pragma once
#include "low_latency_wire.cuh"

#ifdef NODE_RANKS
namespace eprt::low_latency {

static_assert(!kLayered || kTopk <= kWarp, "a lane stands for an entry");

constexpr int kHanderShift = 8;               // of the hander, above the combine row that a message names
constexpr int kBeyond = kRanks - kNodeRanks;  // ranks of other nodes

EPRT_DEVICE int first_of_node(int rank) { return rank / kNodeRanks * kNodeRanks; }
EPRT_DEVICE uint32_t ranks_of_node(int rank) {
  return ((kNodeRanks == 32 ? 0u : 1u << kNodeRanks) - 1) << first_of_node(rank);
}

// The i-th of the ranks of other nodes, this rank's successors first.
EPRT_DEVICE int beyond(const Context& c, int i) { return (first_of_node(c.rank) + kNodeRanks + i) % kRanks; }

// Who hands on for this rank in the node of `rank`; -1: all its ranks are masked.
EPRT_DEVICE int named_in_node(const Context& c, int rank, uint32_t masked) {
  for (int i = 0; i < kNodeRanks; ++i) {
    const int r = first_of_node(rank) + (c.rank + i) % kNodeRanks;
    if (!((masked >> r) & 1)) return r;
  }
  return -1;
}

// To whom a token is copied: LAYERED, for all ranks of another node one copy, in the place of the first of them.
EPRT_DEVICE uint32_t copies_to(const Context& c, uint32_t ranks) {
  if (!kLayered) return ranks;
  uint32_t copies = ranks & ranks_of_node(c.rank);
  for (int first = 0; first < kRanks; first += kNodeRanks)
    if (is_beyond(c, first) && ranks & ranks_of_node(first)) copies |= 1u << first;
  return copies;
}

// ---- addresses ------------------------------------------------------------------------------------------------------

EPRT_DEVICE uint8_t* inbox_at(const Context& c, uint32_t epoch, int source, int token) {
  return c.peer[c.rank] + c.wire.inbox + (set_index(epoch, source) * c.max_tokens + token) * kMessageBytes;
}

EPRT_DEVICE uint8_t* share_at(const Context& c, int hander, uint32_t epoch, int owner, int token, int row) {
  const int64_t index = (set_index(epoch, owner) * c.max_tokens + token) * kRows + row;
  return c.peer[hander] + c.wire.shares + index * kRowBytes;
}

EPRT_DEVICE int64_t sum_index(const Context& c, uint32_t epoch, int token, int node) {
  return (int64_t(epoch % kSets) * c.max_tokens + token) * kNodes + node;
}
EPRT_DEVICE uint8_t* sum_at(const Context& c, uint32_t epoch, int token, int node) {
  return c.peer[c.rank] + c.wire.sums + sum_index(c, epoch, token, node) * kRowBytes;
}
EPRT_DEVICE uint64_t* sum_word(const Context& c, uint32_t epoch, int token, int node) {
  return own_words(c, c.wire.row_word) + sum_index(c, epoch, token, node);
}

EPRT_DEVICE uint32_t* handing_at(const Context& c, int holder, int rank) {
  return reinterpret_cast<uint32_t*>(c.peer[holder] + c.wire.handing) + rank;
}
EPRT_DEVICE uint32_t* given_up_at(const Context& c, int holder, int source) {
  return reinterpret_cast<uint32_t*>(c.peer[holder] + c.wire.given_up) + source;
}

// As ship_message. copies: as copies_to has them.
EPRT_DEVICE void ship_copies(const Context& c, uint32_t copies, uint32_t masked, uint32_t epoch, int token, int warps,
                             int lane) {
  if (!kLayered) return ship_message(c, copies, epoch, token, warps, lane);
  if (!is_last_warp(own_words(c, c.wire.message_done) + token, epoch, warps, lane)) return;
  for (uint32_t left = copies & ranks_beyond(c); left; left &= left - 1) {
    const int first = __ffs(left) - 1;
    eprt_wire_put(inbox_at(c, epoch, c.rank, token), message_at(c, first, epoch, c.rank, token),
                  (kHeaderLines + kPayloadLines) * kLineBytes, message_word(c, epoch, c.rank, token), epoch,
                  named_in_node(c, first, masked));
    count_crossing(c, 0, lane);
  }
}

// ---- the mask of a dispatch -----------------------------------------------------------------------------------------

EPRT_DEVICE uint64_t* agreed_at(const Context& c, uint32_t epoch) {
  return own_words(c, c.wire.agreed) + epoch % kSets;
}

// The thread blocks of a launch may see different masks, but must name the same ranks: the mask of the first one
// counts. Called by one thread of each; waits for nobody.
EPRT_DEVICE uint32_t agree_on_mask(const Context& c, uint32_t epoch, uint32_t masked) {
  uint64_t* word = agreed_at(c, epoch);
  const uint64_t old = load_relaxed(word);
  if (uint32_t(old >> 32) == epoch) return uint32_t(old);
  const uint64_t seen = compare_and_swap_acq_rel(word, old, uint64_t(epoch) << 32 | masked);
  return seen == old ? masked : uint32_t(seen);
}

// ---- waiting for what was handed on ---------------------------------------------------------------------------------
//
// Between its sender and this rank there is one more that may be late: the hander, who itself waits for others. So a
// wait has two parts. While some rank has not begun what must come first, it is that rank which is late, and the
// deadline is everybody's. Then the hander has twice as long, for its own deadlines end before.

struct HandedWait {
  int hander;
  int charged;         // with the second part
  uint64_t begin_ns;   // of the wait, or of the first part anew when a rank was masked
  uint64_t second_ns;  // since when all have begun
};

EPRT_DEVICE HandedWait wait_from_now(int hander, int charged) {
  const uint64_t now = global_timer_ns();
  return {hander, charged, now, now};
}

// By a look at the time `now`; the same in all lanes. unbegun: a bit per living rank that has not begun.
__device__ __noinline__ PeerState judge_handed(const Deadline& deadline, WaitBook* book, HandedWait& wait,
                                               uint32_t unbegun, bool arrived, uint64_t now, uint32_t code,
                                               uint32_t seen, uint32_t expected) {
  const int lane = threadIdx.x % kWarp;
  if (arrived) {
    if (lane == 0 && kStats && book->kept && now > wait.second_ns)
      note_wait_ns(book, wait.charged, now - wait.second_ns);
    return kArrived;
  }
  const int peer = unbegun ? __ffs(unbegun) - 1 : wait.hander;
  const uint64_t limit = unbegun ? deadline.timeout_ns : min(deadline.timeout_ns, ~0ull / 4) * 2;
  const uint64_t waited = now - (unbegun ? wait.begin_ns : wait.second_ns);
  if (unbegun) {
    wait.second_ns = now;
    if ((unbegun >> lane) & 1) note_wait(book, lane, now);
  }
  const bool masked = __any_sync(kAllLanes, is_masked(deadline, wait.hander, now - wait.begin_ns));
  if (masked) return kMasked;
  if (!__any_sync(kAllLanes, waited > limit)) {
    if (lane == 0) tell_wait(deadline, code, peer, waited);
    return kAwaited;
  }
  if (lane == 0) report(deadline.failure, code, peer, seen, expected);
  const uint32_t late = unbegun ? unbegun : 1u << wait.hander;
  if ((late >> lane) & 1) store_relaxed(deadline.mask + lane, 1u);
  if ((late >> wait.hander) & 1) return kLate;
  wait.begin_ns = wait.second_ns = now;  // for the others
  return kAwaited;
}

// Those of `ranks` (a bit each) that are not masked and whose word, at(rank), is before the epoch.
template <class At>
EPRT_DEVICE uint32_t ranks_before(const Context& c, uint32_t ranks, uint32_t epoch, int lane, At at) {
  const bool is_asked = (ranks >> lane) & 1;
  const bool before = is_asked && int32_t(load_acquire_sys(at(is_asked ? lane : c.rank)) - epoch) < 0;
  return __ballot_sync(kAllLanes, before && !load_relaxed(c.deadline.mask + (is_asked ? lane : c.rank)));
}

}  // namespace eprt::low_latency
#endif
