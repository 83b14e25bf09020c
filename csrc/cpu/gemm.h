// Matrix products with (N, K) row-major weights on CPU: y = x W^T, and the SwiGLU experts of one rank.
//
// Batch-invariant: an output row is, bit for bit, a function of its own input row and the weights. The kernels of an
// instruction set sum over K in one order, whatever the number of rows and the place of a row.
//
// gemm.cpp divides the work among threads; gemm_<isa>.cpp hold the kernels (interface: gemm_kernels.h).
#pragma once

#include <cstdint>
#include <limits>

#include "cpu/types.h"

namespace eprt {

constexpr int64_t kFp8Block = 128;  // fp8 weights have one scale per 128 x 128 block
constexpr float kNoLimit = std::numeric_limits<float>::infinity();

// A contiguous weight [N, K]. scale: fp8 [ceil(N / 128), ceil(K / 128)], int8 [N], otherwise null. fp4 (fp4.h): of
// experts alone; each piece is widened to bfloat16 where it is multiplied.
struct Matrix {
  const void* data;
  const float* scale;
  Dtype dtype;
  int64_t n, k;
  float limit = kNoLimit;  // of a SwiGLU's first product: gates are at most this, ups within plus and minus this
  const uint8_t* exponent = nullptr;  // of fp4: [N, K / 32], each 2^(exponent - 127)

  // Matrix e of a stack of matrices of this shape.
  Matrix at(int64_t e) const;
};

// Rows of activations, float32 or bfloat16. The elements of a row are contiguous; rows are `stride` elements apart.
struct Rows {
  const void* data;
  Dtype dtype;
  int64_t stride;
};

// y[M, N] = x[M, K] W^T + bias, in x's dtype, rows of y contiguous. bias: fp32 [N] or null.
void linear(const Rows& x, int64_t m, const Matrix& w, const float* bias, void* y, int num_threads);

// y = (silu(x Wg^T) * (x Wu^T)) Wd^T for the rows of each expert; rows of expert e follow those of expert e - 1.
// w13: matrices [2I, H], gate rows, then up rows; w2: matrices [H, I]. Expert e has matrix matrix_of_expert[e] of both
// stacks, or matrix e if that is null. Rows of y past the last expert's are not written. The intermediate [rows, I] is
// bfloat16 where the kernels multiply bfloat16 (AVX-512 and AMX with bfloat16 x), otherwise float32. AMX quantises
// bfloat16 rows to int8, those of x and of the intermediate, where weights are int8.
void grouped_experts(const Rows& x, const int32_t* count, int64_t num_experts, const int32_t* matrix_of_expert,
                     const Matrix& w13, const Matrix& w2, void* y, int num_threads);

// For tests: at level avx512, run the AMX kernels with emulated tiles. Very slow.
void emulate_amx(bool on);

}  // namespace eprt
