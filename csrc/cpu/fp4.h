// fp4 weights: e2m1, two to a byte, the even column in the low half, with one e8m0 scale per 32 columns.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace eprt {

constexpr int64_t kFp4Block = 32;  // columns of one scale

// out[rows, k] = the values, which bfloat16 holds exactly. data: [rows, k / 2]; scale: [rows, k / 32], 2^(scale - 127).
void fp4_to_bf16(const uint8_t* data, const uint8_t* scale, int64_t rows, int64_t k, bf16* out, int num_threads);

}  // namespace eprt
