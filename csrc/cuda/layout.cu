// Who gets how many of a rank's tokens: what DeepEP's get_dispatch_layout gives. An expert that does not exist counts
// as masked; dispatch names it.
//
// Every thread block reads the whole routing and counts for a share of the experts, so that nothing must be zeroed
// before: a launch of its own would take longer than reading.
//
// Compile-time constants: NUM_RANKS (<= 32).
#include "common.cuh"

namespace eprt {

constexpr int kRanks = NUM_RANKS;
constexpr int kLayoutThreads = 1024;
constexpr int kExpertLoads = 8;  // a thread has under way at once
static_assert(kRanks <= kWarp, "a lane stands for a rank");

struct LayoutParams {
  const void* topk_idx;    // [T, K] expert or -1
  int32_t* rank_tokens;    // [R] tokens for each rank
  int32_t* expert_tokens;  // [E]
  uint8_t* in_rank;        // bool [T, R]
  int32_t num_tokens;      // T
  int32_t top_k;           // K
  int32_t num_experts;     // E
  int32_t idx_bytes;       // of one topk_idx: 4 or 8
};

struct Share {  // of a thread block: from begin to end
  int begin, end;
  EPRT_DEVICE explicit Share(int all) {
    const int each = ceil_div(all, gridDim.x);
    begin = min(all, int(blockIdx.x) * each), end = min(all, begin + each);
  }
  EPRT_DEVICE bool has(int i) const { return begin <= i && i < end; }
};

// The ranks of a token, a bit each; counts its experts of this block's share.
template <class Index>
EPRT_DEVICE uint32_t read_token(const LayoutParams& p, int token, const Share& experts, int32_t* count) {
  const Index* idx = static_cast<const Index*>(p.topk_idx) + int64_t(token) * p.top_k;
  const int per_rank = p.num_experts / kRanks;
  uint32_t ranks = 0;
  for (int first = 0; first < p.top_k; first += kExpertLoads) {
    Index expert[kExpertLoads];
#pragma unroll
    for (int j = 0; j < kExpertLoads; ++j) expert[j] = __ldg(idx + min(first + j, p.top_k - 1));
#pragma unroll
    for (int j = 0; j < kExpertLoads; ++j) {
      if (first + j >= p.top_k || expert[j] < 0 || expert[j] >= p.num_experts) continue;
      const int e = int(expert[j]);
      ranks |= 1u << (e / per_rank);
      if (experts.has(e)) atomicAdd(count + e - experts.begin, 1);
    }
  }
  return ranks;
}

__global__ void __launch_bounds__(kLayoutThreads) layout(const __grid_constant__ LayoutParams p) {
  extern __shared__ int32_t count[];  // of this block's experts
  __shared__ int32_t rank_count[kRanks];
  const Share experts(p.num_experts), tokens(p.num_tokens);
  for (int i = threadIdx.x; i < experts.end - experts.begin; i += kLayoutThreads) count[i] = 0;
  if (threadIdx.x < kRanks) rank_count[threadIdx.x] = 0;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  for (int token = threadIdx.x; token - lane < p.num_tokens; token += kLayoutThreads) {
    uint32_t ranks = 0;
    if (token < p.num_tokens)
      ranks = p.idx_bytes == 8 ? read_token<long long>(p, token, experts, count)
                               : read_token<int32_t>(p, token, experts, count);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const uint32_t sent = __ballot_sync(kAllLanes, (ranks >> r) & 1);
      if (blockIdx.x == 0 && lane == r) atomicAdd(rank_count + r, __popc(sent));
      if (tokens.has(token)) p.in_rank[int64_t(token) * kRanks + r] = (ranks >> r) & 1;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < experts.end - experts.begin; i += kLayoutThreads)
    p.expert_tokens[experts.begin + i] = count[i];
  if (blockIdx.x == 0 && threadIdx.x < kRanks) p.rank_tokens[threadIdx.x] = rank_count[threadIdx.x];
}

}  // namespace eprt
