// The schedule of a step's attention (mla_work.cuh), by one thread block. Compile-time constants: CTAS.
//
// Equal shares for fewer clusters may be better than equal shares for all: 128 requests of one length on 66 clusters
// are two for each of 64, and no unit is cut. So a few numbers of shares are compared, each by a warp.
#include "mla_work.cuh"

namespace eprt {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

struct MlaScheduleParams {
  Lengths all;
  Bound* bound;  // [shares + 1]: written
  int32_t shares;
  int32_t overhead;  // of a unit, in blocks
  int32_t cut;       // what a cut costs each of the two shares, in blocks
  int32_t whole;     // 1: no unit is cut, so its results do not depend on the others
};

// The line of units. Each thread has `each` requests that follow each other.
struct Line {
  const MlaScheduleParams& p;
  int each;
  const int64_t* begin;  // [kThreads + 1]: where each thread's requests begin; the end

  EPRT_DEVICE int64_t size_of(const Request& request) const {
    return int64_t(request.groups(p.all.heads)) * (request.blocks() + p.overhead);
  }

  // The unit and block at this place, in front of the end.
  EPRT_DEVICE Bound find(int64_t place) const {
    int thread = 0;
    for (int step = kThreads / 2; step > 0; step /= 2)
      if (begin[thread + step] <= place) thread += step;
    int i = thread * each;
    int64_t at = begin[thread];
    Request request(p.all, i);
    for (int64_t size; at + (size = size_of(request)) <= place; at += size) request = Request(p.all, ++i);
    const int blocks = request.blocks(), unit = blocks + p.overhead, offset = int(place - at);
    if (p.whole) return {i, (offset + unit / 2) / unit, 0, 0};  // perhaps behind the request's last group
    // What a unit takes besides its blocks is spread over them: a share that continues a unit begins and ends it too.
    const int block = (offset % unit * blocks + unit / 2) / unit + 1 & ~1;  // even: there are two buffers
    return {i, offset / unit, max(0, min(block, (blocks - 1) & ~1)), 0};
  }

  EPRT_DEVICE Bound bound(int share, int shares) const {
    const int64_t total = begin[kThreads];
    if (share >= shares || total == 0) return {p.all.requests, 0, 0, 0};
    return find(share * total / shares);
  }

  // How long the longest share takes, in blocks. Called by all lanes of a warp.
  EPRT_DEVICE float cost(int shares) const {
    int cuts = 0;
    for (int share = threadIdx.x % kWarp; share < shares; share += kWarp)
      cuts = max(cuts, (bound(share, shares).block > 0) + (bound(share + 1, shares).block > 0));
    for (int step = 1; step < kWarp; step *= 2) cuts = max(cuts, __shfl_xor_sync(kAllLanes, cuts, step));
    return float(begin[kThreads]) / shares + cuts * p.cut;
  }
};

// The sum of x over the threads before this one, in sum[threadIdx.x]; over all, in sum[kThreads].
EPRT_DEVICE void sum_before(int64_t x, int64_t* sum) {
  __shared__ int64_t warp_sum[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int64_t upto = x;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t before = __shfl_up_sync(kAllLanes, upto, step);
    if (lane >= step) upto += before;
  }
  if (lane == kWarp - 1) warp_sum[warp] = upto;
  __syncthreads();
  for (int i = 0; i < warp; ++i) upto += warp_sum[i];
  sum[threadIdx.x] = upto - x;
  if (threadIdx.x == kThreads - 1) sum[kThreads] = upto;
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) mla_schedule(const __grid_constant__ MlaScheduleParams p) {
  __shared__ int64_t begin[kThreads + 1];
  __shared__ float cost[kWarps];
  const Line line{p, max(1, ceil_div(p.all.requests, kThreads)), begin};
  const int first = threadIdx.x * line.each, warp = threadIdx.x / kWarp;
  int64_t mine = 0;
  for (int i = first; i < min(first + line.each, p.all.requests); ++i) mine += line.size_of(Request(p.all, i));
  sum_before(mine, begin);
  const float my_cost = line.cost(max(1, p.shares - warp));
  if (threadIdx.x % kWarp == 0) cost[warp] = my_cost;
  __syncthreads();
  int best = 0;
  for (int i = 1; i < kWarps; ++i)
    if (cost[i] < cost[best]) best = i;
  const int shares = max(1, p.shares - best);
  for (int share = threadIdx.x; share <= p.shares; share += kThreads) p.bound[share] = line.bound(share, shares);
}

}  // namespace eprt
