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
  const Bound* bound;    // [shares + 1]
  const float* partial;  // [2 shares, kGroupRows, kLatent]: weighted means
  const float* log_sum;  // [2 shares, kGroupRows]: log2 of the sum of the weights
  uint16_t* out;         // bf16 [tokens, heads, kLatent]
  int32_t shares;
};

// The cuts of a unit: bounds inside it, which follow each other.
struct Cuts {
  int first, count;

  // Called by all lanes.
  EPRT_DEVICE Cuts(const MlaCombineParams& p, const Bound& unit) : first(p.shares), count(0) {
    for (int begin = 1; begin < p.shares; begin += kWarp) {
      const int share = min(begin + int(threadIdx.x % kWarp), p.shares);
      const Bound bound = p.bound[share];
      const uint32_t inside = __ballot_sync(kAllLanes, share < p.shares && same_unit(bound, unit) && bound.block > 0);
      if (inside && count == 0) first = begin + __ffs(inside) - 1;
      count += __popc(inside);
    }
  }
};

// Part i of the unit is that of share first - 1 + i; the first of them begins the unit.
EPRT_DEVICE int row_of_part(int first, int i, int row) {
  return partial_slot(first - 1 + i, i == 0) * kGroupRows + row;
}

// nothing() where the share has no part: its bounds are the same.
EPRT_DEVICE float log_sum_of(const MlaCombineParams& p, int first, int i, int row) {
  const Bound from = p.bound[first - 1 + i], to = p.bound[first + i];
  if (i > 0 && same_unit(to, from) && to.block == from.block) return nothing();
  return p.log_sum[row_of_part(first, i, row)];
}

// There are kBlocksOfUnit thread blocks for each bound. Those of a unit's first cut add up its rows; if it has more
// cuts, those of the others take a share of the columns.
__global__ void __launch_bounds__(kThreads) mla_combine(const __grid_constant__ MlaCombineParams p) {
  await_preceding_kernel();
  const int lane = threadIdx.x % kWarp, me = blockIdx.x / kBlocksOfUnit + 1;
  const Bound unit = p.bound[me];
  if (unit.block == 0) return;
  const Request request(p.all, unit.request);
  const int row = blockIdx.x % kBlocksOfUnit * kRowsOfBlock + threadIdx.x / kWarp;
  const int row_of_request = unit.group * kGroupRows + row;
  if (row_of_request >= request.tokens * p.all.heads) return;
  const Cuts cuts(p, unit);
  const int sharers = cuts.count >= 4 ? 4 : cuts.count >= 2 ? 2 : 1, quads = kQuads / sharers;
  if (me - cuts.first >= sharers) return;
  const int first_quad = (me - cuts.first) * quads * kWarp + lane, parts = cuts.count + 1;
  float most = nothing(), total = 0.f;
  for (int i = lane; i < parts; i += kWarp) most = fmaxf(most, log_sum_of(p, cuts.first, i, row));
  for (int step = 1; step < kWarp; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
  Quad sum[kQuads] = {};
  for (int begin = 0; begin < parts; begin += kWarp) {
    const float one = begin + lane < parts ? log_sum_of(p, cuts.first, begin + lane, row) : nothing();
    const float mine = one == nothing() ? 0.f : exp2f(one - most);
    total += mine;
#pragma unroll 8
    for (int k = 0; k < min(kWarp, parts - begin); ++k) {
      const float weight = __shfl_sync(kAllLanes, mine, k);
      const Quad* from =
          reinterpret_cast<const Quad*>(p.partial + int64_t(row_of_part(cuts.first, begin + k, row)) * kLatent);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        Quad part = {};  // nobody wrote a part without a weight
        if (weight != 0.f && quad < quads) part = from[first_quad + quad * kWarp];
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
  for (int quad = 0; quad < kQuads; ++quad) {
    const float* v = sum[quad].v;
    const uint64_t upper = pack_bf16(v[2] * scale, v[3] * scale);
    if (quad < quads) out[first_quad + quad * kWarp] = upper << 32 | pack_bf16(v[0] * scale, v[1] * scale);
  }
}

}  // namespace eprt
