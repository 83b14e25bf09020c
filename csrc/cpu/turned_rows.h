// DeepSeek V4's queries, keys and outputs: a norm, then the rotation of a row's last values, then rounding.
//
//   y = x / sqrt(mean(x^2) + eps) * weight, rounded to x's type; the last values of y in pairs turned by the angles of
//   the row's position, or by their negatives; then rounded to out's type
//
// Everything in fp32, each row by itself. The norm, or its weight alone, may be left out.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace eprt {

struct TurnedRowsArgs {
  const void* x;  // [rows, heads, size]; strides in elements, the last dimension contiguous
  Dtype type;
  int64_t x_row, x_head;
  bool is_normed;
  float eps;
  const void* weight;  // [size], or null
  Dtype weight_type;
  const float* cos_sin;     // [num_positions, turned]: turned / 2 cosines, then as many sines
  const int64_t* position;  // [rows]
  bool reversed;
  void* out;  // [rows, heads, size], contiguous
  Dtype out_type;
  int64_t rows, heads, size, turned, num_positions;
  int num_threads;
};

// The first row whose position lies outside the table (nothing is computed then), or -1.
int64_t turned_rows(const TurnedRowsArgs& args);

#define EPRT_TURNED_ROWS_KERNEL(isa)            \
  namespace isa {                               \
  void turned_rows(const TurnedRowsArgs& args); \
  }
EPRT_TURNED_ROWS_KERNEL(scalar)
EPRT_TURNED_ROWS_KERNEL(avx2)
EPRT_TURNED_ROWS_KERNEL(avx512)
#undef EPRT_TURNED_ROWS_KERNEL

}  // namespace eprt
