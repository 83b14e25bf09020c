// Waiting for peers, and statistics of who was late. Shared by the kernels of both modes, each of which has a Context
// with `deadline` and `stats`.
//
// Compile-time constants: NUM_RANKS (<= 32), STATS (0, 1: counters).
#pragma once
#include "common.cuh"

namespace eprt {

constexpr int kRanks = NUM_RANKS;
constexpr bool kStats = STATS;
static_assert(kRanks <= kWarp, "a lane stands for a rank");

struct Stats {           // totals, in device memory of this rank
  uint64_t* wait_ns;     // [2][2][R]: of dispatch, combine; sum and maximum, as one thread block measured them
  int64_t* tokens;       // [2][R]: sent to, received from
  int64_t* calls;        // [1]
  int64_t* compute_ns;   // [1]: from the end of a dispatch to its combine
  uint64_t* blocked_ns;  // [1]: the sum over calls of each call's longest wait
};

// One thread block measures how long each rank was waited for: a sample that finds a late rank and costs nothing.
constexpr uint32_t kWaitStepNs = 32;  // the resolution of the clock; 137 s fit into 32 bits, whose atomics are fast

struct WaitBook {           // in shared memory
  uint64_t begin_ns;        // waits are measured from this time; 0: not yet
  uint32_t waited[kRanks];  // in steps of kWaitStepNs
  bool kept;                // whether this thread block measures
};

// The caller passes a barrier before the first wait. begins: waits are measured from now on, else from begin_waiting
// on.
EPRT_DEVICE void open_book(WaitBook* book, bool kept, bool begins = true) {
  if (threadIdx.x == 0) book->begin_ns = begins ? global_timer_ns() : 0, book->kept = kStats && kept;
  if (threadIdx.x < kRanks) book->waited[threadIdx.x] = 0;
}

// The first thread to call this sets the time.
EPRT_DEVICE void begin_waiting(WaitBook* book) {
  if (kStats && book->kept) atomicCAS(&book->begin_ns, uint64_t(0), global_timer_ns());
}

EPRT_DEVICE void note_wait_ns(WaitBook* book, int peer, uint64_t ns) {
  atomicMax(book->waited + peer, uint32_t(min(ns / kWaitStepNs, uint64_t(0xffffffffu))));
}

// end_ns: when the wait ended.
EPRT_DEVICE void note_wait(WaitBook* book, int peer, uint64_t end_ns) {
  if (!kStats || !book->kept) return;
  const uint64_t begin_ns = atomicCAS(&book->begin_ns, uint64_t(0), uint64_t(0));
  if (begin_ns && end_ns > begin_ns) note_wait_ns(book, peer, end_ns - begin_ns);
}

EPRT_DEVICE void add_to_total(uint64_t* total, uint64_t n) {  // fire and forget
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(total), "l"(n) : "memory");
}

EPRT_DEVICE void add_to_total(int64_t* total, int64_t n) { add_to_total(reinterpret_cast<uint64_t*>(total), n); }

EPRT_DEVICE void add_to_total(int32_t* total, int32_t n) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(total), "r"(n) : "memory");
}

EPRT_DEVICE void raise_total(uint64_t* total, uint64_t n) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(total), "l"(n) : "memory");
}

EPRT_DEVICE void add_longest(uint64_t* total, const WaitBook* book) {
  uint32_t longest = 0;
#pragma unroll
  for (int r = 0; r < kRanks; ++r) longest = max(longest, book->waited[r]);
  if (longest) add_to_total(total, uint64_t(longest) * kWaitStepNs);
}

// Called after a barrier that follows the last wait. kind: 0 dispatch, 1 combine. wait_cost: the caller's own totals
// [R], or null.
template <class Context>
EPRT_DEVICE void close_book(const Context& c, WaitBook* book, int kind, int64_t* wait_cost = nullptr) {
  if (!kStats || !book->kept || threadIdx.x >= kRanks) return;
  if (threadIdx.x == 0) add_longest(c.stats.blocked_ns, book);
  const uint64_t waited = uint64_t(book->waited[threadIdx.x]) * kWaitStepNs;
  if (waited == 0) return;
  if (wait_cost) add_to_total(wait_cost + threadIdx.x, int64_t(waited));
  uint64_t* sum = c.stats.wait_ns + kind * 2 * kRanks + threadIdx.x;
  add_to_total(sum, waited);
  raise_total(sum + kRanks, waited);
}

// A bit per masked rank. Called by one warp.
EPRT_DEVICE uint32_t masked_ranks(const Deadline& deadline, int lane) {
  return __ballot_sync(kAllLanes, lane < kRanks && load_relaxed(deadline.mask + lane));
}

// Waits until a peer has raised a flag in our heap to this epoch (kOrLater: or a later one); false if the peer is
// masked or late.
template <bool kOrLater = false, class Context>
EPRT_DEVICE bool wait_peer(const Context& c, WaitBook* book, const uint32_t* flag, uint32_t epoch, uint32_t code,
                           int peer) {
  if (load_acquire_sys(flag) == epoch) return true;
  const WaitEnd end = wait_longer<kOrLater>(flag, epoch, c.deadline, code, peer);
  note_wait(book, peer, end.ns);
  return end.arrived;
}

// ---- what a warp awaits together ------------------------------------------------------------------------------------

enum PeerState : int { kAwaited, kArrived, kMasked, kLate };

// How it stands with a peer that the warp has awaited since `start`, by a look at the time `now`; the same in all
// lanes. At the deadline: reports, masks the peer so that nobody waits for it again. seen: what was there instead of
// `expected`. Not inlined, as wait_longer is not: it would be code to load in the middle of every wait.
__device__ __noinline__ PeerState judge_peer(const Deadline& deadline, WaitBook* book, int peer, bool arrived,
                                             uint64_t start, uint64_t now, uint32_t code, uint32_t seen,
                                             uint32_t expected) {
  PeerState state = kArrived;
  if (!arrived) {
    const bool masked = __any_sync(kAllLanes, is_masked(deadline, peer, now - start));
    const bool late = __any_sync(kAllLanes, now - start > deadline.timeout_ns);
    state = masked ? kMasked : late ? kLate : kAwaited;
  }
  if (threadIdx.x % kWarp != 0) return state;
  if (state == kAwaited) {
    tell_wait(deadline, code, peer, now - start);
    return state;
  }
  note_wait(book, peer, now);
  if (state != kLate) return state;
  report(deadline.failure, code, peer, seen, expected);
  store_relaxed(deadline.mask + peer, 1u);
  return state;
}

}  // namespace eprt
