// From a piece's fp32 sums to what is stored: scale, bias, SiLU, rounding. Included by each gemm_<isa>.cpp, whose
// compiler flags vectorise these loops; hence the anonymous namespace (see isa.h).
//
// Loops run over kLanes columns at a time, the last ones past the piece's edge: one code path for every column, so that
// a value cannot depend on where its column falls. The sums therefore have room for round_up(n, kLanes) columns.
#pragma once

#include <bit>
#include <cstring>

#include "cpu/gemm_kernels.h"

namespace eprt {
namespace {

constexpr int kLanes = 16;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

inline float to_float(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Round to nearest even; NaN stays a quiet NaN.
inline bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40;
  return {static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? quiet : rounded)};
}

// e^x to about 1 ulp: x = n ln2 + r, |r| <= ln2 / 2, degree-6 polynomial (Taylor coefficients suffice at this width
// with the last two fitted), times 2^n in two factors so that results near the ends of the range stay exact.
inline float exp_lane(float x) {
  const float clamped = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  const float n = (clamped * 1.44269504f + kRound) - kRound;
  float r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const int32_t i = static_cast<int32_t>(n);
  const int32_t half = i >> 1;
  const float a = std::bit_cast<float>((half + 127) << 23);
  const float b = std::bit_cast<float>((i - half + 127) << 23);
  return p * a * b;
}

inline float silu_lane(float x) { return x / (1.0f + exp_lane(-x)); }

// Rounds kLanes values to the stored dtype and writes the first `count` of them at column `column` of a row.
inline void store_lanes(const float* value, int count, Dtype dtype, void* row, int64_t column) {
  if (dtype == Dtype::kFloat32) {
    std::memcpy(static_cast<float*>(row) + column, value, count * sizeof(float));
    return;
  }
  bf16 rounded[kLanes];
  for (int i = 0; i < kLanes; ++i) rounded[i] = to_bf16(value[i]);
  bf16* out = static_cast<bf16*>(row) + column;
  if (count == kLanes) {
    std::memcpy(out, rounded, sizeof(rounded));
  } else {
    std::memcpy(out, rounded, count * sizeof(bf16));
  }
}

// scale and bias of kLanes columns, 1 and 0 where there is none or the column is past the end.
struct ColumnFactors {
  float scale[kLanes];
  float bias[kLanes];
};

inline ColumnFactors column_factors(const Matrix& w, const float* bias, int64_t column, int count) {
  ColumnFactors f;
  const bool int8 = w.dtype == Dtype::kInt8;
  for (int i = 0; i < kLanes; ++i) {
    f.scale[i] = int8 && i < count ? w.scale[column + i] : 1.0f;
    f.bias[i] = bias != nullptr && i < count ? bias[column + i] : 0.0f;
  }
  return f;
}

// y = sums * scale + bias. sums: [m][ld].
inline void store_linear(const float* sums, int64_t ld, const Piece& piece, const Output& out) {
  const int64_t row_bytes = out.stride * (out.dtype == Dtype::kFloat32 ? 4 : 2);
  for (int j = 0; j < piece.n; j += kLanes) {
    const int count = piece.n - j < kLanes ? piece.n - j : kLanes;
    const ColumnFactors f = column_factors(piece.w, out.bias, piece.n0 + j, count);
    for (int m = 0; m < piece.m; ++m) {
      const float* sum = sums + m * ld + j;
      float value[kLanes];
      for (int i = 0; i < kLanes; ++i) value[i] = sum[i] * f.scale[i] + f.bias[i];
      store_lanes(value, count, out.dtype, static_cast<char*>(out.y) + m * row_bytes, piece.n0 + j);
    }
  }
}

// h = silu(gate * scale) * (up * scale), row by row.
inline void store_gate_up(const float* gate, const float* up, int64_t ld, const Piece& piece, Dtype h_dtype, void* h,
                          int64_t h_stride) {
  for (int j = 0; j < piece.n; j += kLanes) {
    const int count = piece.n - j < kLanes ? piece.n - j : kLanes;
    const ColumnFactors g = column_factors(piece.w, nullptr, piece.n0 + j, count);
    const ColumnFactors u = column_factors(piece.w, nullptr, piece.w.n / 2 + piece.n0 + j, count);
    for (int m = 0; m < piece.m; ++m) {
      const float* gate_sum = gate + m * ld + j;
      const float* up_sum = up + m * ld + j;
      float value[kLanes];
      for (int i = 0; i < kLanes; ++i) value[i] = silu_lane(gate_sum[i] * g.scale[i]) * (up_sum[i] * u.scale[i]);
      store_lanes(value, count, h_dtype, static_cast<char*>(h) + m * h_stride, piece.n0 + j);
    }
  }
}

}  // namespace
}  // namespace eprt
