// Kernels for any x86-64 (four lanes, baseline instructions). Also the plainest statement of what a Math class does.
#include <algorithm>
#include <cmath>

#include "cpu/gemm_block.h"

namespace eprt {
namespace {

struct ScalarMath {
  using X = float;
  typedef float Operand __attribute__((vector_size(16)));
  using Sum = Operand;
  static constexpr int kStep = 4, kMaxRows = 3, kTile = 12;
  static constexpr bool kFoldsScale = true;

  static float decode(fp8 w) {
    const uint32_t magnitude = w.bits & 0x7f;
    const float value = magnitude == 0x7f ? NAN
                        : magnitude < 8   ? static_cast<float>(magnitude) * 0x1p-9f
                                          : std::bit_cast<float>((magnitude << 20) + (120u << 23));
    return w.bits & 0x80 ? -value : value;
  }

  static Operand load(const float* p) { return Operand{p[0], p[1], p[2], p[3]}; }
  static Operand load(const int8_t* p) { return Operand{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
  static Operand load(const bf16* p) { return Operand{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
  static Operand load_scaled(const fp8* p, float scale) {
    return Operand{decode(p[0]), decode(p[1]), decode(p[2]), decode(p[3])} * scale;
  }
  static void store(float* p, Operand v) { std::memcpy(p, &v, sizeof(v)); }

  static Sum zero() { return Sum{}; }
  static Sum mul_add(Operand x, Operand w, Sum sum) { return sum + x * w; }
  template <int N>
  static void reduce(const Sum* sums, float* out) {
    for (int i = 0; i < N; ++i) out[i] = (sums[i][0] + sums[i][2]) + (sums[i][1] + sums[i][3]);
  }
};

}  // namespace

const GemmKernels& gemm_kernels_scalar(Dtype x, Dtype) { return float_kernels<ScalarMath>(x); }

}  // namespace eprt
