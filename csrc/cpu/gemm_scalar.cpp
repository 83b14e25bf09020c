// Kernels for any x86-64 (four lanes, baseline instructions), and the simplest example of a Math class.
#include <array>
#include <limits>

#include "cpu/gemm_block.h"

namespace eprt {
namespace {

// The value of each e4m3fn code.
constexpr std::array<float, 256> kFp8Values = [] {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = exponent == 0 ? mantissa : 8 + mantissa;  // in units of 2^-9
    for (int i = 1; i < exponent; ++i) value *= 2;
    value = exponent == 15 && mantissa == 7 ? std::numeric_limits<float>::quiet_NaN() : value / 512;
    values[code] = code & 128 ? -value : value;
  }
  return values;
}();

struct ScalarMath {
  using X = float;
  typedef float Operand __attribute__((vector_size(16)));
  using Sum = Operand;
  static constexpr int kStep = 4;
  static constexpr int kDirectRows = 3;
  static constexpr bool kFoldsScale = true;
  template <class W>
  static constexpr bool kPairs = false;
  static constexpr TileShape kTile{3, 4}, kScaledTile = kTile;
  static constexpr int direct_columns(int rows, bool) { return rows <= 3 ? 4 : 0; }

  static float decode(fp8 w) { return kFp8Values[w.bits]; }

  static Operand load(const float* p) { return Operand{p[0], p[1], p[2], p[3]}; }
  static Operand load(const int8_t* p) { return Operand{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
  static Operand load(const bf16* p) { return Operand{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
  static Operand load_scaled(const fp8* p, float scale) {
    return Operand{decode(p[0]), decode(p[1]), decode(p[2]), decode(p[3])} * scale;
  }
  static void store(float* p, Operand v) { std::memcpy(p, &v, sizeof(v)); }

  static Sum zero() { return Sum{}; }
  static Sum mul_add(Operand x, Operand w, Sum sum) { return sum + x * w; }
  template <int ROWS, int COLS>
  static void add_reduced(const Sum* sums, float* out, int64_t ld) {
    for (int r = 0; r < ROWS; ++r) {
      for (int c = 0; c < COLS; ++c) {
        const Sum sum = sums[r * COLS + c];
        out[r * ld + c] += (sum[0] + sum[2]) + (sum[1] + sum[3]);
      }
    }
  }
};

}  // namespace

const GemmKernels& gemm_kernels_scalar(Dtype x, Dtype) { return float_kernels<ScalarMath>(x); }

}  // namespace eprt
