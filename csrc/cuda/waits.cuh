// Waiting for peers, with the books of who was late. Used by the kernels of both modes, each with a Context of its own
// that has `deadline` and `stats`.
//
// Compile-time constants: NUM_RANKS (<= 32), STATS (0, 1: counters).
#pragma once
#include "common.cuh"

namespace eprt {

constexpr int kRanks = NUM_RANKS;
constexpr bool kStats = STATS;
static_assert(kRanks <= kWarp, "a lane stands for a rank");

struct Stats {           // totals, all in device memory of this rank
  uint64_t* wait_ns;     // [2][2][R]: dispatch, combine; sum and maximum, as thread block 0 saw it
  int64_t* tokens;       // [2][R]: sent to, received from
  int64_t* slot_rows;    // [L]
  int64_t* calls;        // [1]
  int64_t* compute_ns;   // [1]: from the end of a dispatch to its combine
  uint64_t* blocked_ns;  // [1]: the longest of each call's waits, added up
};

// One thread block keeps the books of who was waited for how long: a sample good enough to find a late rank, for free.
struct WaitBook {  // in shared memory
  uint64_t begin_ns;
  uint32_t waited_ns[kRanks];
  bool kept;
};

EPRT_DEVICE void open_book(WaitBook* book, bool kept) {  // the caller passes a barrier before the first wait
  if (threadIdx.x == 0) book->begin_ns = global_timer_ns(), book->kept = kStats && kept;
  if (threadIdx.x < kRanks) book->waited_ns[threadIdx.x] = 0;
}

EPRT_DEVICE void add_longest(uint64_t* total, const WaitBook* book) {
  uint32_t longest = 0;
#pragma unroll
  for (int r = 0; r < kRanks; ++r) longest = max(longest, book->waited_ns[r]);
  if (longest) atomicAdd(reinterpret_cast<unsigned long long*>(total), static_cast<unsigned long long>(longest));
}

// After a barrier that follows the last wait. verb: 0 dispatch, 1 combine. wait_cost: the caller's own totals [R], or
// null.
template <class Context>
EPRT_DEVICE void close_book(const Context& c, WaitBook* book, int verb, int64_t* wait_cost = nullptr) {
  if (!kStats || !book->kept || threadIdx.x >= kRanks) return;
  if (threadIdx.x == 0) add_longest(c.stats.blocked_ns, book);
  const uint64_t waited = book->waited_ns[threadIdx.x];
  if (wait_cost) wait_cost[threadIdx.x] += waited;
  uint64_t* sum = c.stats.wait_ns + verb * 2 * kRanks + threadIdx.x;
  *sum += waited;
  if (waited > sum[kRanks]) sum[kRanks] = waited;
}

// Until a peer has raised a flag in our heap to this epoch; false when it is masked, or was so at the deadline.
template <class Context>
EPRT_DEVICE bool wait_peer(const Context& c, WaitBook* book, const uint32_t* flag, uint32_t epoch, uint32_t code,
                           int peer) {
  if (load_acquire_sys(flag) == epoch) return true;
  const bool arrived = wait_longer(flag, epoch, c.deadline, code, peer);
  if (kStats && book->kept) atomicMax(book->waited_ns + peer, uint32_t(global_timer_ns() - book->begin_ns));
  return arrived;
}

}  // namespace eprt
