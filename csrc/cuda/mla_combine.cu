// Adds up the partial results of units that the schedule cut (mla_work.cuh): a warp for each row of each of them.
// Compile-time constants: CTAS.
#include "mla_work.cuh"

namespace eprt {

constexpr int kThreads = 256;
constexpr int kRowsOfBlock = kThreads / kWarp;
constexpr int kBlocksOfUnit = kGroupRows / kRowsOfBlock;
constexpr int kQuads = kLatent / 4 / kWarp;  // of a lane, where a warp adds up a whole row
constexpr int kLoads = 8;                    // quads of a lane on their way at a time

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

// Whether that share has a part: it has none where its bounds are the same.
EPRT_DEVICE bool is_part(const MlaCombineParams& p, int first, int i) {
  const Bound from = p.bound[first - 1 + i], to = p.bound[first + i];
  return i == 0 || !same_unit(to, from) || to.block != from.block;
}

// A row's weighted mean of its parts: kSharers warps have equal shares of its columns, and this one the part `share`.
// Called by all lanes.
template <int kSharers>
EPRT_DEVICE void add_up(const MlaCombineParams& p, const Cuts& cuts, int share, int row, int64_t out_row) {
  constexpr int kMine = kQuads / kSharers, kParts = kLoads / kMine;
  const int lane = threadIdx.x % kWarp, first_quad = share * kMine * kWarp + lane, parts = cuts.count + 1;
  const Quad* partial = reinterpret_cast<const Quad*>(p.partial) + first_quad;
  float most = nothing(), scale = 0.f;
  Quad sum[kMine] = {};
  for (int begin = 0; begin < parts; begin += kWarp) {
    const int mine = begin + lane;
    const float stored = p.log_sum[row_of_part(cuts.first, min(mine, parts - 1), row)];
    const float log_sum = mine < parts && is_part(p, cuts.first, mine) ? stored : nothing();
    float larger = fmaxf(most, log_sum);
    for (int step = 1; step < kWarp; step *= 2) larger = fmaxf(larger, __shfl_xor_sync(kAllLanes, larger, step));
    const float fade = most == nothing() ? 0.f : exp2f(most - larger);
    const float my_weight = log_sum == nothing() ? 0.f : exp2f(log_sum - larger);
    float total = my_weight;
    for (int step = 1; step < kWarp; step *= 2) total += __shfl_xor_sync(kAllLanes, total, step);
    most = larger, scale = scale * fade + total;
#pragma unroll
    for (int quad = 0; quad < kMine; ++quad)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[quad].v[e] *= fade;
#pragma unroll 1
    for (int k = 0; k < min(kWarp, parts - begin); k += kParts) {
      Quad x[kParts][kMine];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int part = min(begin + k + i, parts - 1);
        const Quad* from = partial + int64_t(row_of_part(cuts.first, part, row)) * (kLatent / 4);
#pragma unroll
        for (int quad = 0; quad < kMine; ++quad) x[i][quad] = from[quad * kWarp];
      }
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float weight = __shfl_sync(kAllLanes, my_weight, k + i);
#pragma unroll
        for (int quad = 0; quad < kMine; ++quad)
#pragma unroll
          for (int e = 0; e < 4; ++e)  // nobody wrote a part without a weight
            sum[quad].v[e] += weight != 0.f ? x[i][quad].v[e] * weight : 0.f;
      }
    }
  }
  scale = scale > 0.f ? 1.f / scale : 0.f;
  uint64_t* out = reinterpret_cast<uint64_t*>(p.out + out_row * kLatent);
#pragma unroll
  for (int quad = 0; quad < kMine; ++quad) {
    const float* v = sum[quad].v;
    const uint64_t upper = pack_bf16(v[2] * scale, v[3] * scale);
    out[first_quad + quad * kWarp] = upper << 32 | pack_bf16(v[0] * scale, v[1] * scale);
  }
}

// There are kBlocksOfUnit thread blocks for each bound. Those of a unit's first cut add up its rows; if it has more
// cuts, those of the others take a share of the columns. What the schedule wrote is read while the attention still
// runs: that has waited for the schedule.
__global__ void __launch_bounds__(kThreads) mla_combine(const __grid_constant__ MlaCombineParams p) {
  const int me = blockIdx.x / kBlocksOfUnit + 1;
  const Bound unit = p.bound[me];
  if (unit.block == 0) return await_preceding_kernel();
  const Request request(p.all, unit.request);
  const int row = blockIdx.x % kBlocksOfUnit * kRowsOfBlock + threadIdx.x / kWarp;
  const int row_of_request = unit.group * kGroupRows + row;
  const Cuts cuts(p, unit);
  const int64_t out_row = int64_t(request.first_token) * p.all.heads + row_of_request;
  const int sharers = cuts.count >= 4 ? 4 : cuts.count >= 2 ? 2 : 1, share = me - cuts.first;
  await_preceding_kernel();
  if (share >= sharers || row_of_request >= request.tokens * p.all.heads) return;
  if (sharers == 4)
    add_up<4>(p, cuts, share, row, out_row);
  else if (sharers == 2)
    add_up<2>(p, cuts, share, row, out_row);
  else
    add_up<1>(p, cuts, share, row, out_row);
}

}  // namespace eprt
