// What an instruction set offers to the driver in gemm.cpp: two operations on one thread's piece of a product.
#pragma once

#include "cpu/gemm.h"

namespace eprt {

// Rows [0, m) of packed activations times n rows of w.
struct Piece {
  const void* x;     // packed activations, first row of the piece
  int64_t x_stride;  // bytes from row to row
  int m;             // 1..GemmKernels::max_rows
  Matrix w;
  int64_t n0;                     // the first column of the result
  int n;                          // 1..kMaxColumns
  int64_t row = n0;               // the first row of w: another one where w holds a part of the weight
  int64_t up_row = w.n / 2 + n0;  // of the ups, in gate_up
};

constexpr int kMaxColumns = 192;

// Where a linear piece is stored: y[m][n0 + j], rows `stride` elements apart.
struct Output {
  void* y;
  Dtype dtype;
  int64_t stride;
  const float* bias;  // [w.n] or null
};

struct GemmKernels {
  // Activations are multiplied in a packed layout, rows `packed_row_bytes(k)` apart. pack == nullptr: rows of x are
  // used unpacked. Packed rows may be written and read in pieces that start at multiples of 16 rows (of an expert).
  int64_t (*packed_row_bytes)(int64_t k);
  void (*pack)(const void* x, int64_t x_stride, int64_t m, int64_t k, void* packed, int64_t packed_stride);

  // y piece = x W^T (+ bias).
  void (*linear)(const Piece& piece, const Output& out);

  // h piece = silu(x Wg^T) * (x Wu^T), packed: from gate rows [row, row + n) of w and up rows [up_row, up_row + n) to
  // columns [n0, n0 + n) of h, which has w.n / 2.
  void (*gate_up)(const Piece& piece, void* h, int64_t h_stride);

  int max_rows;     // of a piece; a multiple of 16
  int column_unit;  // pieces start at multiples of this; a divisor of kMaxColumns

  // Quantises packed rows of h, of k elements each, in place: up to 16 at once, from a multiple of 16 rows (of an
  // expert) on. nullptr: rows are multiplied as gate_up leaves them.
  void (*requantize)(void* h, int64_t m, int64_t k) = nullptr;
};

// The kernels for these dtypes of activations and weights.
const GemmKernels& gemm_kernels_scalar(Dtype x, Dtype w);
const GemmKernels& gemm_kernels_avx2(Dtype x, Dtype w);
const GemmKernels& gemm_kernels_avx512(Dtype x, Dtype w);
const GemmKernels& gemm_kernels_amx(Dtype x, Dtype w);
const GemmKernels& gemm_kernels_amx_emulated(Dtype x, Dtype w);

}  // namespace eprt
