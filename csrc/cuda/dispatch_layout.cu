// How many of a rank's tokens go to each rank and expert: DeepEP's get_dispatch_layout. An expert that does not exist
// counts as masked; dispatch reports it.
//
// Thread blocks count their own tokens and add their counts to `totals`; the last block to finish copies the totals out
// and leaves zeros for the next launch. So one launch suffices, none zeroes the outputs, and the routing is read once.
//
// Compile-time constants: NUM_RANKS (<= 32).
#include "common.cuh"

namespace eprt {

constexpr int kRanks = NUM_RANKS;
constexpr int kLayoutThreads = 256;
constexpr int kExpertLoads = 8;  // loads that a thread has in flight
static_assert(kRanks <= kWarp, "a lane stands for a rank");

struct LayoutParams {
  const void* topk_idx;    // [T, K]: expert or -1
  int32_t* rank_tokens;    // [R]: tokens for each rank
  int32_t* expert_tokens;  // [E]: tokens for each expert
  uint8_t* in_rank;        // bool [T, R]: whether the token goes to the rank
  int32_t* totals;         // [E + R + 1]: counts of experts, of ranks; finished thread blocks. 0 between launches
  int32_t num_tokens;      // T
  int32_t top_k;           // K
  int32_t num_experts;     // E
  int32_t idx_bytes;       // of one topk_idx: 4 or 8
};

// Counts a token's experts; returns a bit per rank that it goes to.
template <class Index>
EPRT_DEVICE uint32_t read_token(const LayoutParams& p, int token, int32_t* expert_count) {
  const Index* idx = static_cast<const Index*>(p.topk_idx) + int64_t(token) * p.top_k;
  const int per_rank = p.num_experts / kRanks;
  uint32_t ranks = 0;
  for (int first = 0; first < p.top_k; first += kExpertLoads) {
    Index expert[kExpertLoads];
#pragma unroll
    for (int j = 0; j < kExpertLoads; ++j) expert[j] = idx[min(first + j, p.top_k - 1)];
#pragma unroll
    for (int j = 0; j < kExpertLoads; ++j) {
      if (first + j >= p.top_k || expert[j] < 0 || expert[j] >= p.num_experts) continue;
      ranks |= 1u << (int(expert[j]) / per_rank);
      atomicAdd(expert_count + int(expert[j]), 1);
    }
  }
  return ranks;
}

// Counts this block's tokens. count: [E + R], zeroed.
EPRT_DEVICE void count_tokens(const LayoutParams& p, int32_t* count, int lane) {
  const int step = int(gridDim.x) * kLayoutThreads;
  for (int token = int(blockIdx.x) * kLayoutThreads + threadIdx.x; token - lane < p.num_tokens; token += step) {
    const bool inside = token < p.num_tokens;
    uint32_t ranks = 0;
    if (inside) ranks = p.idx_bytes == 8 ? read_token<int64_t>(p, token, count) : read_token<int32_t>(p, token, count);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const uint32_t sent = __ballot_sync(kAllLanes, (ranks >> r) & 1);
      if (lane == r) atomicAdd(count + p.num_experts + r, __popc(sent));
      if (inside) p.in_rank[int64_t(token) * kRanks + r] = (ranks >> r) & 1;
    }
  }
}

// Adds this block's counts to the totals; true for the last block to finish.
EPRT_DEVICE bool add_up(const LayoutParams& p, const int32_t* count) {
  __shared__ bool last;
  const int columns = p.num_experts + kRanks;
  for (int i = threadIdx.x; i < columns; i += kLayoutThreads)
    if (count[i]) atomicAdd(p.totals + i, count[i]);
  __syncthreads();  // orders the block's sums before the ticket (cumulativity)
  if (threadIdx.x == 0) last = fetch_add_acq_rel(p.totals + columns, 1) == int(gridDim.x) - 1;
  __syncthreads();
  return last;
}

__global__ void __launch_bounds__(kLayoutThreads) layout(const __grid_constant__ LayoutParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  int32_t* const count = reinterpret_cast<int32_t*>(smem);
  const int columns = p.num_experts + kRanks;
  for (int i = threadIdx.x; i < columns; i += kLayoutThreads) count[i] = 0;
  __syncthreads();
  count_tokens(p, count, threadIdx.x % kWarp);
  __syncthreads();
  if (!add_up(p, count)) return;
  for (int i = threadIdx.x; i < columns; i += kLayoutThreads) {
    int32_t* to = i < p.num_experts ? p.expert_tokens + i : p.rank_tokens + (i - p.num_experts);
    *to = int(load_relaxed(reinterpret_cast<const uint32_t*>(p.totals + i)));
    p.totals[i] = 0;
  }
  if (threadIdx.x == 0) p.totals[columns] = 0;
}

}  // namespace eprt
