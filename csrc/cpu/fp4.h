// fp4 weights: e2m1, two to a byte, the even column in the low half, with one e8m0 scale per 32 columns.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace eprt {

constexpr int64_t kFp4Block = 32;  // columns of one scale

constexpr float kFp4Values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// Every code under one scale in bfloat16, which holds them exactly: low bytes, then high bytes.
struct Fp4Codes {
  uint8_t low[16], high[16];
};

// out = the values of `blocks` blocks of 32. data: 16 bytes a block; scale: one byte a block, 2^(scale - 127).
void fp4_to_bf16(const uint8_t* data, const uint8_t* scale, int64_t blocks, bf16* out);

namespace scalar {
void fp4_to_bf16(const Fp4Codes* of_scale, const uint8_t* data, const uint8_t* scale, int64_t blocks, bf16* out);
}
namespace avx2 {
void fp4_to_bf16(const Fp4Codes* of_scale, const uint8_t* data, const uint8_t* scale, int64_t blocks, bf16* out);
}

}  // namespace eprt
