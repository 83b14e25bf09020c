// Arithmetic of softmax by a warpgroup whose lanes hold sums as tensor cores leave them. Weights are powers of 2; their
// scale is a logarithm to the base of 2.
#pragma once
#include "common.cuh"

namespace eprt {

constexpr float kSlack = 8.f;  // a scale is raised when a score exceeds it by more than this
constexpr float kLog2e = 1.4426950408889634f;

EPRT_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What a row's sums are multiplied by when the scale of its weights changes.
EPRT_DEVICE float fade(float before, float after) {
  return before == after || before == nothing() ? 1.f : exp2_fast(before - after);  // the sum of nothing stays 0
}

// Trades the upper lane's first word for the lower lane's second one.
EPRT_DEVICE void exchange(uint32_t& first, uint32_t& second, bool upper, int distance) {
  const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? first : second, distance);
  first = upper ? got : first, second = upper ? second : got;
}

}  // namespace eprt
