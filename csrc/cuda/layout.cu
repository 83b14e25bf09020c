// Who gets how many of a rank's tokens: what DeepEP's get_dispatch_layout gives. An expert that does not exist counts
// as masked; dispatch names it.
//
// Compile-time constants: NUM_RANKS (<= 32).
#include "common.cuh"

namespace eprt {

constexpr int kRanks = NUM_RANKS;
constexpr int kLayoutThreads = 256;
static_assert(kRanks <= kWarp, "a lane stands for a rank");

struct LayoutParams {
  const void* topk_idx;  // [T, K] expert or -1
  int32_t* count;        // [R + E], zeros before: tokens for each rank, tokens for each expert
  uint8_t* in_rank;      // bool [T, R]
  int32_t num_tokens;    // T
  int32_t top_k;         // K
  int32_t num_experts;   // E
  int32_t idx_bytes;     // of one topk_idx: 4 or 8
};

EPRT_DEVICE int64_t read_expert(const LayoutParams& p, int64_t i) {
  return p.idx_bytes == 8 ? static_cast<const int64_t*>(p.topk_idx)[i] : static_cast<const int32_t*>(p.topk_idx)[i];
}

__global__ void __launch_bounds__(kLayoutThreads) layout(const __grid_constant__ LayoutParams p) {
  extern __shared__ int32_t count[];  // [R + E], of this block
  const int width = kRanks + p.num_experts, per_rank = p.num_experts / kRanks, lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x; i < width; i += kLayoutThreads) count[i] = 0;
  __syncthreads();
  const int step = int(gridDim.x) * kLayoutThreads;
  for (int token = int(blockIdx.x) * kLayoutThreads + int(threadIdx.x); token - lane < p.num_tokens; token += step) {
    uint32_t ranks = 0;
    for (int k = 0; k < p.top_k && token < p.num_tokens; ++k) {
      const int64_t expert = read_expert(p, int64_t(token) * p.top_k + k);
      if (expert < 0 || expert >= p.num_experts) continue;
      atomicAdd(count + kRanks + expert, 1);
      ranks |= 1u << (expert / per_rank);
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const uint32_t tokens = __ballot_sync(kAllLanes, (ranks >> r) & 1);
      if (lane == r) atomicAdd(count + r, __popc(tokens));
      if (token < p.num_tokens) p.in_rank[int64_t(token) * kRanks + r] = (ranks >> r) & 1;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < width; i += kLayoutThreads)
    if (count[i]) atomicAdd(p.count + i, count[i]);
}

}  // namespace eprt
