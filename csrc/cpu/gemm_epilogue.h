// From a piece's fp32 sums to stored values: int8 row scales, bias, SiLU, rounding. Works element by element, so a
// value does not depend on its neighbours. Included by each gemm_<isa>.cpp.
//
// Reads whole registers of sums, past a row's last column: rows of sums have room for round_up(n, 16) columns.
#pragma once

#include "cpu/gemm_kernels.h"
#include "cpu/vec.h"

namespace eprt {
namespace {

// The int8 scales of a piece's weight rows from `row` on; null for other weights.
inline const float* row_scale(const Matrix& w, int64_t row) {
  return w.dtype == Dtype::kInt8 ? w.scale + row : nullptr;
}

inline Vec load_scaled_sum(const float* sum, const float* scale, int j, int count) {
  return scale == nullptr ? load(sum + j) : load(sum + j) * load_n(scale + j, count);
}

// At most limit. Of a NaN: NaN, since the maximum of both is its second operand then.
inline Vec bounded(Vec x, Vec limit) { return zero() - max(zero() - limit, zero() - x); }

// silu(gate) * up, of gate at most limit and up within -limit..limit.
inline Vec swiglu(Vec gate, Vec up, float limit) {
  if (limit < kNoLimit) {
    const Vec most = set1(limit);
    gate = bounded(gate, most);
    up = max(zero() - most, bounded(up, most));
  }
  const Vec one = set1(1.0f);
  return gate / (one + exp2(gate * set1(-kLog2E))) * up;
}

template <class T>
inline void store_count(T* p, Vec value, int count) {
  if (count == Vec::kWidth) return store(p, value);
  store_n(p, value, count);
}

template <class T>
void store_linear_as(const float* sums, int64_t ld, const Piece& piece, const Output& out) {
  const float* scale = row_scale(piece.w, piece.row);
  for (int m = 0; m < piece.m; ++m) {
    T* y = static_cast<T*>(out.y) + m * out.stride + piece.n0;
    for (int j = 0; j < piece.n; j += Vec::kWidth) {
      const int count = min_of(Vec::kWidth, piece.n - j);
      Vec value = load_scaled_sum(sums + m * ld, scale, j, count);
      if (out.bias != nullptr) value = value + load_n(out.bias + piece.n0 + j, count);
      store_count(y + j, value, count);
    }
  }
}

// y = sums * scale + bias. sums: [m][ld].
inline void store_linear(const float* sums, int64_t ld, const Piece& piece, const Output& out) {
  if (out.dtype == Dtype::kFloat32) return store_linear_as<float>(sums, ld, piece, out);
  store_linear_as<bf16>(sums, ld, piece, out);
}

// h = silu(gate * scale) * (up * scale). h: rows of T, h_stride bytes apart.
template <class T>
void store_gate_up(const float* gate, const float* up, int64_t ld, const Piece& piece, void* h, int64_t h_stride) {
  const float* gate_scale = row_scale(piece.w, piece.row);
  const float* up_scale = row_scale(piece.w, piece.up_row);
  for (int m = 0; m < piece.m; ++m) {
    T* h_row = reinterpret_cast<T*>(static_cast<char*>(h) + m * h_stride) + piece.n0;
    for (int j = 0; j < piece.n; j += Vec::kWidth) {
      const int count = min_of(Vec::kWidth, piece.n - j);
      const Vec value = swiglu(load_scaled_sum(gate + m * ld, gate_scale, j, count),
                               load_scaled_sum(up + m * ld, up_scale, j, count), piece.w.limit);
      store_count(h_row + j, value, count);
    }
  }
}

}  // namespace
}  // namespace eprt
