// Adds up the partial results of units that the schedule cut (mla_work.cuh): a warp for each row of each of them.
// Compile-time constants: CTAS.
#include "mla_work.cuh"

namespace eprt {

constexpr int kThreads = 256;
constexpr int kRowsOfBlock = kThreads / kWarp;
constexpr int kBlocksOfUnit = kGroupRows / kRowsOfBlock;
constexpr int kQuads = kLatent / 4 / kWarp;  // of a lane

struct MlaCombineParams {
  Lengths all;
  const Bound* bound;      // [shares + 1]
  const float* partial;    // [2 shares, kGroupRows, kLatent]: weighted means
  const float* log_sum;    // [2 shares, kGroupRows]: log2 of the sum of the weights
  uint16_t* out;           // bf16 [tokens, heads, kLatent]
  int32_t shares;
};

__global__ void __launch_bounds__(kThreads) mla_combine(const __grid_constant__ MlaCombineParams p) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // The unit is that of the first bound inside it.
  const int first = blockIdx.x / kBlocksOfUnit + 1;
  const Bound bound = p.bound[first], before = p.bound[first - 1];
  if (bound.block == 0 || (bound.same_unit(before) && before.block > 0)) return;
  const Request request(p.all, bound.request);
  const int lane = threadIdx.x % kWarp, row = blockIdx.x % kBlocksOfUnit * kRowsOfBlock + threadIdx.x / kWarp;
  const int row_of_request = bound.group * kGroupRows + row;
  if (row_of_request >= request.tokens * p.all.heads) return;
  float most = nothing(), total = 0.f;
  float4 sum[kQuads] = {};
  const auto add = [&](int slot) {
    const int at = slot * kGroupRows + row;
    const float one = p.log_sum[at];
    if (one == nothing()) return;
    const float larger = fmaxf(most, one), fade = exp2f(most - larger), weight = exp2f(one - larger);
    const float4* from = reinterpret_cast<const float4*>(p.partial + int64_t(at) * kLatent);
    most = larger, total = total * fade + weight;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 v = from[lane + i * kWarp];
      sum[i].x = sum[i].x * fade + v.x * weight, sum[i].y = sum[i].y * fade + v.y * weight;
      sum[i].z = sum[i].z * fade + v.z * weight, sum[i].w = sum[i].w * fade + v.w * weight;
    }
  };
  add(partial_slot(first - 1, true));
  for (int share = first; share < p.shares; ++share) {
    const Bound from = p.bound[share], to = p.bound[share + 1];
    if (!from.same_unit(bound)) break;
    if (!to.same_unit(from) || to.block > from.block) add(partial_slot(share, false));
  }
  const float scale = total > 0.f ? 1.f / total : 0.f;
  const int64_t out_row = int64_t(request.first_token) * p.all.heads + row_of_request;
  uint2* out = reinterpret_cast<uint2*>(p.out + out_row * kLatent);
#pragma unroll
  for (int i = 0; i < kQuads; ++i)
    out[lane + i * kWarp] = {pack_bf16(sum[i].x * scale, sum[i].y * scale),
                             pack_bf16(sum[i].z * scale, sum[i].w * scale)};
}

}  // namespace eprt
