// Products of bfloat16 on the tensor cores of sm_90, by a warpgroup (four warps): 64 rows of the left operand, 16 deep.
// Operands in shared memory lie as copies through tensor maps with 128-byte swizzle leave them.
#pragma once
#include "wgmma.cuh"

namespace eprt {

// The descriptor of a right operand that is stored transposed: tiles of 64 columns, tile_bytes apart, each of which
// has 128 bytes for each of the rows that the product sums over. For the 16 rows from 16 i on, add 128 i.
EPRT_DEVICE uint64_t transposed_operand(const void* rows, uint32_t tile_bytes) {
  constexpr uint64_t kEightRows = 1024 / 16, kSwizzle128 = 1;
  return uint64_t((shared_address(rows) & 0x3ffff) >> 4) | uint64_t(tile_bytes >> 4) << 16 | kEightRows << 32 |
         kSwizzle128 << 62;
}

// d += w x^T, kColumns rows of x; both operands in shared memory. Which lane holds what: see multiply in wgmma.cuh.
template <int kColumns>
EPRT_DEVICE void multiply_bf16(float (&d)[kColumns / 2], uint64_t w, uint64_t x);

// sums: of a thread. w_name, x_name: the places of these operands' names.
#define MULTIPLY_BF16(columns, sums, w_name, x_name)                                                   \
  template <>                                                                                          \
  EPRT_DEVICE void multiply_bf16<columns>(float (&d)[columns / 2], uint64_t w, uint64_t x) {           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" WGMMA_NAMES_##sums \
                 "}, %" w_name ", %" x_name ", 1, 1, 1, 0, 0;"                                         \
                 : WGMMA_SUMS_##sums                                                                   \
                 : "l"(w), "l"(x));                                                                    \
  }

MULTIPLY_BF16(16, 8, "8", "9")
MULTIPLY_BF16(32, 16, "16", "17")
MULTIPLY_BF16(48, 24, "24", "25")
MULTIPLY_BF16(64, 32, "32", "33")
MULTIPLY_BF16(80, 40, "40", "41")
MULTIPLY_BF16(96, 48, "48", "49")
MULTIPLY_BF16(112, 56, "56", "57")
MULTIPLY_BF16(128, 64, "64", "65")
MULTIPLY_BF16(144, 72, "72", "73")
MULTIPLY_BF16(160, 80, "80", "81")
MULTIPLY_BF16(176, 88, "88", "89")

#undef MULTIPLY_BF16

// d (+)= x y^T, 64 columns; both operands in shared memory.
EPRT_DEVICE void multiply_bf16(float (&d)[32], uint64_t x, uint64_t y, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_NAMES_32
      "}, %32, %33, add, 1, 1, 0, 0; }"
      : WGMMA_SUMS_32
      : "l"(x), "l"(y), "r"(int(add)));
}

// The same, 128 columns.
EPRT_DEVICE void multiply_bf16(float (&d)[64], uint64_t x, uint64_t y, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{" WGMMA_NAMES_64 "}, %64, %65, add, 1, 1, 0, 0; }"
      : WGMMA_SUMS_64
      : "l"(x), "l"(y), "r"(int(add)));
}

// d += x y, 256 columns, for a transposed operand y; x in shared memory.
EPRT_DEVICE void add_product(float (&d)[128], uint64_t x, uint64_t y) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_NAMES_128 "}, %128, %129, 1, 1, 1, 0, 1;"
               : WGMMA_SUMS_128
               : "l"(x), "l"(y));
}

// The same; x in registers: rows and columns as in d, two bfloat16 a word.
EPRT_DEVICE void add_product(float (&d)[128], const uint32_t* x, uint64_t y) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_NAMES_128
               "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
               : WGMMA_SUMS_128
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));
}

// The same, 128 columns.
EPRT_DEVICE void add_product(float (&d)[64], const uint32_t* x, uint64_t y) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_NAMES_64
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : WGMMA_SUMS_64
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));
}

// Keeps the compiler from moving uses of these registers across this place: it does not know that products write them
// until they are waited for.
template <int N>
EPRT_DEVICE void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

}  // namespace eprt
