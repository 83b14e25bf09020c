// Queries of latent attention as mla_dense_fp8.cu takes them: a warp for each row (token, head).
//
// A row becomes TERMS times 512 latents in e4m3, of which the second ones are what the first leave over, and 64 rotated
// values in bfloat16, all of them divided by the row's scale.
// Compile-time constant: TERMS (1 or 2).
#include "cast.cuh"
#include "mla_work.cuh"

namespace eprt {

constexpr int kTerms = TERMS;
constexpr int kThreads = 256;
constexpr int kOutBytes = kTerms * kLatent + 128;  // of a row
constexpr float kSmallest = 1e-12f;                // keeps latents of zeros from dividing by zero

struct MlaQuantizeParams {
  const uint16_t* q;  // bf16 [rows, kEntry]
  uint8_t* out;       // [rows, kOutBytes]
  float* scale;       // [rows]
  int32_t rows;
};

EPRT_DEVICE void unpack_fp8(uint32_t word, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(word >> 16 * i)));
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
        : "=f"(x[2 * i]), "=f"(x[2 * i + 1])
        : "r"(halves));
  }
}

// What the cast `first` of u * factor leaves over.
EPRT_DEVICE Vec16 cast_rest(const Unit& u, float factor, const Vec16& first) {
  Vec16 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t a = i < 2 ? u.lo.w[2 * i] : u.hi.w[2 * i - 4], b = i < 2 ? u.lo.w[2 * i + 1] : u.hi.w[2 * i - 3];
    float x[4];
    unpack_fp8(first.w[i], x);
    out.w[i] = pack_fp8(bf16_lo(a) * factor - x[0], bf16_hi(a) * factor - x[1], bf16_lo(b) * factor - x[2],
                        bf16_hi(b) * factor - x[3]);
  }
  return out;
}

__global__ void __launch_bounds__(kThreads) mla_quantize(const __grid_constant__ MlaQuantizeParams p) {
  await_preceding_kernel();
  start_following_kernel();
  const int lane = threadIdx.x % kWarp;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= p.rows) return;
  const uint8_t* from = reinterpret_cast<const uint8_t*>(p.q + row * kEntry);
  const Unit u{load_streaming(from + lane * 32), load_streaming(from + lane * 32 + 16)};
  const uint32_t rope = *reinterpret_cast<const uint32_t*>(from + 2 * kLatent + lane * 4);
  float amax = largest_magnitude(u);
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
  const Fp8Scale scale = fp8_scale(fmaxf(amax, kSmallest), false);
  uint8_t* to = p.out + row * kOutBytes;
  const Vec16 first = cast_to_fp8(u, scale.factor);
  *reinterpret_cast<Vec16*>(to + lane * 16) = first;
  if (kTerms == 2) *reinterpret_cast<Vec16*>(to + kLatent + lane * 16) = cast_rest(u, scale.factor, first);
  *reinterpret_cast<uint32_t*>(to + kTerms * kLatent + lane * 4) =
      pack_bf16(bf16_lo(rope) * scale.factor, bf16_hi(rope) * scale.factor);
  if (lane == 0) p.scale[row] = scale.scale;
}

}  // namespace eprt
