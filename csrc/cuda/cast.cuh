// Casts bf16 to fp8 (e4m3) with a scale per 128 values, in the registers of a warp.
#pragma once
#include "common.cuh"

namespace eprt {

struct Unit {
  Vec16 lo, hi;  // 16 bf16 values
};

// Eight neighbouring lanes hold one scale group of 128 values. All lanes of the warp take part in the shuffles.
EPRT_DEVICE Vec16 quantize(const Unit& u, bool ue8m0, float* scale) {
  float v[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = bf16_lo(u.lo.w[i]), v[2 * i + 1] = bf16_hi(u.lo.w[i]);
    v[8 + 2 * i] = bf16_lo(u.hi.w[i]), v[9 + 2 * i] = bf16_hi(u.hi.w[i]);
  }
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(v[i]));
#pragma unroll
  for (int lane = 1; lane < 8; lane *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, lane));
  const Fp8Scale s = fp8_scale(amax, ue8m0);
  *scale = s.scale;
  Vec16 out;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out.w[i] = pack_fp8(v[4 * i] * s.factor, v[4 * i + 1] * s.factor, v[4 * i + 2] * s.factor, v[4 * i + 3] * s.factor);
  return out;
}

}  // namespace eprt
