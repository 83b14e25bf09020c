// Casts bf16 to fp8 (e4m3) with a scale per 128 values, in the registers of a warp.
#pragma once
#include "common.cuh"

namespace eprt {

struct Unit {
  Vec16 lo, hi;  // 16 bf16 values
};

EPRT_DEVICE float largest_magnitude(const Unit& u) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float lo = fmaxf(fabsf(bf16_lo(u.lo.w[i])), fabsf(bf16_hi(u.lo.w[i])));
    largest = fmaxf(largest, fmaxf(lo, fmaxf(fabsf(bf16_lo(u.hi.w[i])), fabsf(bf16_hi(u.hi.w[i])))));
  }
  return largest;
}

EPRT_DEVICE Vec16 cast_to_fp8(const Unit& u, float factor) {
  Vec16 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t a = i < 2 ? u.lo.w[2 * i] : u.hi.w[2 * i - 4], b = i < 2 ? u.lo.w[2 * i + 1] : u.hi.w[2 * i - 3];
    out.w[i] = pack_fp8(bf16_lo(a) * factor, bf16_hi(a) * factor, bf16_lo(b) * factor, bf16_hi(b) * factor);
  }
  return out;
}

// Eight neighbouring lanes hold one scale group of 128 values. All lanes of the warp take part in the shuffles.
EPRT_DEVICE Vec16 quantize(const Unit& u, bool ue8m0, float* scale) {
  float amax = largest_magnitude(u);
#pragma unroll
  for (int lane = 1; lane < 8; lane *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, lane));
  const Fp8Scale s = fp8_scale(amax, ue8m0);
  *scale = s.scale;
  return cast_to_fp8(u, s.factor);
}

}  // namespace eprt
