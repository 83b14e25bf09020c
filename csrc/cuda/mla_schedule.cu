// The schedule of a step's attention (mla_work.cuh), by one thread block. Compile-time constants: CTAS.
//
// Equal shares for fewer clusters may be better than equal shares for all: 128 requests of one length on 66 clusters
// are two for each of 64, and no unit is cut. So a few numbers of shares are compared, each by a warp, and two ways to
// cut a line into so many.
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

// Ways to count what a unit takes besides its blocks, its overhead: in front of its blocks, and once more for each
// share that continues it; or spread over its blocks. Shares of different units are even by the first, equal parts of
// one unit by the second.
enum class Overhead { kInFront, kSpread };

// Where a share begins, and where that lies on a line with overhead in front.
struct Start {
  Bound bound;
  int64_t at;
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
  EPRT_DEVICE Start find(int64_t place, Overhead way) const {
    int thread = 0;
    for (int step = kThreads / 2; step > 0; step /= 2)
      if (begin[thread + step] <= place) thread += step;
    int i = thread * each;
    int64_t at = begin[thread];
    Request request(p.all, i);
    for (int64_t size; at + (size = size_of(request)) <= place; at += size) request = Request(p.all, ++i);
    const int blocks = request.blocks(), unit = blocks + p.overhead, offset = int(place - at), inside = offset % unit;
    if (p.whole) {  // the group may be the one behind the request's last
      const int group = (offset + unit / 2) / unit;
      return {{i, group, 0, 0}, at + int64_t(group) * unit};
    }
    const int nearest = way == Overhead::kSpread ? (inside * blocks + unit / 2) / unit : inside - p.overhead;
    const int block = max(0, min(nearest + 1 & ~1, (blocks - 1) & ~1));  // even: there are two buffers
    return {{i, offset / unit, block, 0}, place - inside + (block > 0 ? p.overhead + block : 0)};
  }

  EPRT_DEVICE Start start(int share, int shares, Overhead way) const {
    const int64_t total = begin[kThreads];
    if (share >= shares || total == 0) return {{p.all.requests, 0, 0, 0}, total};
    if (way == Overhead::kSpread || share == 0) return find(share * total / shares, way);
    return find(min(p.overhead + share * (total - p.overhead) / shares, total - 1), way);
  }

  // How long the longest share takes, in blocks. Called by all lanes of a warp.
  EPRT_DEVICE int cost(int shares, Overhead way) const {
    int most = 0;
    for (int share = threadIdx.x % kWarp; share < shares; share += kWarp) {
      const Start from = start(share, shares, way), to = start(share + 1, shares, way);
      const int continues = from.bound.block > 0 ? p.overhead + p.cut : 0, is_cut = to.bound.block > 0 ? p.cut : 0;
      most = max(most, int(to.at - from.at) + continues + is_cut);
    }
    for (int step = 1; step < kWarp; step *= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, step));
    return most;
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
  __shared__ int cost[2 * kWarps];
  const Line line{p, max(1, ceil_div(p.all.requests, kThreads)), begin};
  const int first = threadIdx.x * line.each, warp = threadIdx.x / kWarp;
  int64_t mine = 0;
  for (int i = first; i < min(first + line.each, p.all.requests); ++i) mine += line.size_of(Request(p.all, i));
  sum_before(mine, begin);
  for (int way = 0; way < 2; ++way) {
    const int my_cost = line.cost(max(1, p.shares - warp), Overhead(way));
    if (threadIdx.x % kWarp == 0) cost[2 * warp + way] = my_cost;
  }
  __syncthreads();
  int best = 0;
  for (int i = 1; i < 2 * kWarps; ++i)
    if (cost[i] < cost[best]) best = i;
  const int shares = max(1, p.shares - best / 2);
  for (int share = threadIdx.x; share <= p.shares; share += kThreads)
    p.bound[share] = line.start(share, shares, Overhead(best % 2)).bound;
}

}  // namespace eprt
