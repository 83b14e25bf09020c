// Adds up the partial results of units that the schedule cut (mla_work.cuh): a warp for each row of each of them.
// Compile-time constants: CTAS.
#include "mla_work.cuh"

namespace eprt {

constexpr int kThreads = 256;
constexpr int kRowsOfBlock = kThreads / kWarp;
constexpr int kBlocksOfUnit = kGroupRows / kRowsOfBlock;
constexpr int kQuads = kLatent / 4 / kWarp;  // of a lane

struct alignas(16) Quad {
  float v[4];
};

struct MlaCombineParams {
  Lengths all;
  const Bound* bound;      // [shares + 1]
  const float* partial;    // [2 shares, kGroupRows, kLatent]: weighted means
  const float* log_sum;    // [2 shares, kGroupRows]: log2 of the sum of the weights
  uint16_t* out;           // bf16 [tokens, heads, kLatent]
  int32_t shares;
};

// Of part i of a unit, that of a share; nothing() where the share has no part.
EPRT_DEVICE float log_sum_of(const MlaCombineParams& p, int slot, int share, int i, int row) {
  const Bound from = p.bound[share], to = p.bound[share + 1];
  if (i > 0 && same_unit(to, from) && to.block == from.block) return nothing();
  return p.log_sum[slot * kGroupRows + row];
}

__global__ void __launch_bounds__(kThreads) mla_combine(const __grid_constant__ MlaCombineParams p) {
  await_preceding_kernel();
  // The unit is that of the first bound inside it.
  const int first = blockIdx.x / kBlocksOfUnit + 1;
  const Bound bound = p.bound[first], before = p.bound[first - 1];
  if (bound.block == 0 || (same_unit(bound, before) && before.block > 0)) return;
  const Request request(p.all, bound.request);
  const int lane = threadIdx.x % kWarp, row = blockIdx.x % kBlocksOfUnit * kRowsOfBlock + threadIdx.x / kWarp;
  const int row_of_request = bound.group * kGroupRows + row;
  if (row_of_request >= request.tokens * p.all.heads) return;
  // Part i is that of share first - 1 + i. Lane l looks at parts l, l + 32, ...
  const auto slot_of = [&](int i) { return partial_slot(first - 1 + i, i == 0); };
  int count = 0;
  for (uint32_t all = kAllLanes; all == kAllLanes; count += __popc(all)) {
    const int share = first + count + lane;
    all = __ballot_sync(kAllLanes, share < p.shares && same_unit(p.bound[min(share, p.shares)], bound));
  }
  ++count;
  float most = nothing(), total = 0.f;
  for (int i = lane; i < count; i += kWarp) most = fmaxf(most, log_sum_of(p, slot_of(i), first - 1 + i, i, row));
  for (int step = 1; step < kWarp; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
  Quad sum[kQuads] = {};
  for (int begin = 0; begin < count; begin += kWarp) {
    const int i = begin + lane;
    const float one = i < count ? log_sum_of(p, slot_of(i), first - 1 + i, i, row) : nothing();
    const float mine = one == nothing() ? 0.f : exp2f(one - most);
    total += mine;
#pragma unroll 4
    for (int k = 0; k < min(kWarp, count - begin); ++k) {
      const float weight = __shfl_sync(kAllLanes, mine, k);
      const int64_t at = int64_t(slot_of(begin + k)) * kGroupRows + row;
      const Quad* from = reinterpret_cast<const Quad*>(p.partial + at * kLatent);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        Quad part = {};  // nobody wrote a part without a weight
        if (weight != 0.f) part = from[lane + quad * kWarp];
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[quad].v[e] += part.v[e] * weight;
      }
    }
  }
  for (int step = 1; step < kWarp; step *= 2) total += __shfl_xor_sync(kAllLanes, total, step);
  const float scale = total > 0.f ? 1.f / total : 0.f;
  const int64_t out_row = int64_t(request.first_token) * p.all.heads + row_of_request;
  uint64_t* out = reinterpret_cast<uint64_t*>(p.out + out_row * kLatent);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float* v = sum[i].v;
    const uint64_t upper = pack_bf16(v[2] * scale, v[3] * scale);
    out[lane + i * kWarp] = upper << 32 | pack_bf16(v[0] * scale, v[1] * scale);
  }
}

}  // namespace eprt
