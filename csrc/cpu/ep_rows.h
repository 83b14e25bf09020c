// Kernels over one row of a token: cast to fp8, sums. The implementations for the instruction sets are bit
// identical: sums multiply and add in fp32 without contraction (see CMakeLists.txt), in the order of their terms.
#pragma once

#include <cstdint>

#include "cpu/ep_layout.h"

namespace eprt::ep {

inline constexpr int kMaxTopK = 64;  // terms of a row, kept on the stack

// A term of a sum: weight * row.
struct Term {
  const void* row;
  float weight;
  Dtype dtype;
};

struct RowKernels {
  // e4m3 values and one scale per 128: scale = max|x| / 448, value = x * (448 / max|x|), rounded to nearest even.
  void (*quantize)(const void* x, Dtype dtype, int hidden, uint8_t* values, float* scales);
  // out = the sum of the terms in order, rounded once (to nearest even) if out is bf16; zeros without terms.
  void (*weighted_sum)(const Term* terms, int num_terms, int hidden, void* out, Dtype out_dtype);
  // out = a + b, rounded to nearest even; out may be either.
  void (*add)(const void* a, const void* b, Dtype dtype, int hidden, void* out);
};

// The kernels of the instruction set in use.
const RowKernels& row_kernels();

}  // namespace eprt::ep
