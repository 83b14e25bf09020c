// Matrix products with (N, K) row-major weights on CPU: y = x W^T, and the SwiGLU experts of one rank.
//
// Batch-invariant: an output row is a function of its own input row and the weights, bit for bit. Every kernel of one
// instruction set sums over K in one order, whatever the number of rows and wherever a row stands.
//
// gemm.cpp shares the work out over threads; gemm_<isa>.cpp hold the kernels (interface: gemm_kernels.h).
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace eprt {

constexpr int64_t kFp8Block = 128;  // fp8 weights carry one scale per 128 x 128 block

// An (N, K) weight, contiguous. scale: fp8 [ceil(N/128), ceil(K/128)], int8 [N], else null.
struct Matrix {
  const void* data;
  const float* scale;
  Dtype dtype;
  int64_t n, k;

  // Matrix e of a stack of matrices of this shape.
  Matrix at(int64_t e) const;
};

// Rows of activations: float32 or bfloat16, elements of a row contiguous, `stride` elements from row to row.
struct Rows {
  const void* data;
  Dtype dtype;
  int64_t stride;
};

// y[M, N] = x[M, K] W^T + bias, in x's dtype, rows of y contiguous. bias: fp32 [N] or null.
void linear(const Rows& x, int64_t m, const Matrix& w, const float* bias, void* y, int num_threads);

// y = (silu(x Wg^T) * (x Wu^T)) Wd^T for the rows of each expert; rows of expert e follow those of e - 1.
// w13: matrices [2I, H], gate rows then up rows; w2: [H, I]. Expert e's are matrices storage[e] of both stacks, e
// itself where storage is null. Rows of y past the last expert's are not written. The intermediate [rows, I] is kept in
// bfloat16 where the kernels multiply bfloat16 (AVX-512 and AMX with bfloat16 x), else in float32.
void grouped_experts(const Rows& x, const int32_t* count, int64_t num_experts, const int32_t* storage,
                     const Matrix& w13, const Matrix& w2, void* y, int num_threads);

// For tests: at level avx512, run the AMX kernels with their tiles emulated. Very slow.
void emulate_amx(bool on);

}  // namespace eprt
