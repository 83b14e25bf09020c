// The schedule of a step's attention (mla_work.cuh), by one thread block. Compile-time constants: CTAS.
#include "mla_work.cuh"

namespace eprt {

constexpr int kThreads = 256;

struct MlaScheduleParams {
  Lengths all;
  Bound* bound;      // [shares + 1]: written
  int32_t shares;
  int32_t overhead;  // of a unit, in blocks
};

// The sum of x over the threads before this one; total: over all threads.
EPRT_DEVICE int64_t sum_before(int64_t x, int64_t& total) {
  __shared__ int64_t warp_sum[kThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t sum = x;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t before = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == kWarp - 1) warp_sum[warp] = sum;
  __syncthreads();
  int64_t before = 0;
  total = 0;
  for (int i = 0; i < kThreads / kWarp; ++i) {
    if (i < warp) before += warp_sum[i];
    total += warp_sum[i];
  }
  return before + sum - x;
}

__global__ void __launch_bounds__(kThreads) mla_schedule(const __grid_constant__ MlaScheduleParams p) {
  const int each = ceil_div(p.all.requests, kThreads), first = min(int(threadIdx.x) * each, p.all.requests);
  const int end = min(first + each, p.all.requests);
  int64_t mine = 0, total;
  for (int i = first; i < end; ++i) {
    const Request request(p.all, i);
    mine += int64_t(request.groups(p.all.heads)) * (request.blocks() + p.overhead);
  }
  int64_t at = sum_before(mine, total);
  // The bounds in front of the first unit that has a length; there is none if total is 0.
  for (int share = threadIdx.x; share <= p.shares; share += kThreads)
    if (share == p.shares || total == 0) p.bound[share] = {p.all.requests, 0, 0, 0};
  for (int i = first; i < end; ++i) {
    const Request request(p.all, i);
    const int unit = request.blocks() + p.overhead;
    const int64_t next = at + int64_t(request.groups(p.all.heads)) * unit;
    if (next == at) continue;
    for (int share = int((at * p.shares + total - 1) / total); share < p.shares; ++share) {
      const int64_t place = share * total / p.shares;
      if (place >= next) break;
      const int group = int(place - at) / unit, block = int(place - at) % unit - p.overhead;
      p.bound[share] = {i, group, max(0, block & ~1), 0};  // even: a cluster alternates between two buffers
    }
    at = next;
  }
}

}  // namespace eprt
