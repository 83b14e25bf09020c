// Products of e4m3 on the tensor cores of sm_90 whose left operand lies in registers, and what brings bytes there
// transposed: 8-bit products take both operands only with what they sum over side by side.
#pragma once
#include "wgmma.cuh"

namespace eprt {

// d += x y^T, 64 rows by 64 columns, 32 deep. x: lane l of warp w holds of row 16 w + l / 4 the bytes 4 (l % 4) .. + 3
// in x[0], those 16 further in x[2]; of the row 8 below the same in x[1] and x[3]. d: see multiply in wgmma.cuh.
EPRT_DEVICE void add_product_fp8(float (&d)[32], const uint32_t (&x)[4], uint64_t y) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_NAMES_32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1;"
               : WGMMA_SUMS_32
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));
}

// d (+)= x y^T, the same operands.
EPRT_DEVICE void multiply_fp8(float (&d)[32], const uint32_t (&x)[4], uint64_t y, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{" WGMMA_NAMES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1; }"
      : WGMMA_SUMS_32
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(int(add)));
}

// Starts to load 16 bytes of each of 32 rows, two bytes of two rows a word. my_row: of the 32 rows, row `lane`.
EPRT_DEVICE void load_pairs(uint32_t (&pairs)[4], const uint8_t* my_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(shared_address(my_row))
               : "memory");
}

// The first, or the second, bytes of the pairs in two words.
EPRT_DEVICE uint32_t first_bytes(uint32_t a, uint32_t b) {
  uint32_t bytes;
  asm volatile("prmt.b32 %0, %1, %2, 0x6420;" : "=r"(bytes) : "r"(a), "r"(b));
  return bytes;
}
EPRT_DEVICE uint32_t second_bytes(uint32_t a, uint32_t b) {
  uint32_t bytes;
  asm volatile("prmt.b32 %0, %1, %2, 0x7531;" : "=r"(bytes) : "r"(a), "r"(b));
  return bytes;
}

// Loaded pairs as the left operand above. Row r of the operand's 16 rows of a warp is byte 2 (r % 8) + r / 8 of the
// loaded rows; of 16 of these, byte 4 t + 2 i + e of the operand's rows is row 8 i + 2 t + e.
EPRT_DEVICE void arrange_pairs(uint32_t (&x)[4], const uint32_t (&pairs)[4]) {
  x[0] = first_bytes(pairs[0], pairs[1]), x[1] = second_bytes(pairs[0], pairs[1]);
  x[2] = first_bytes(pairs[2], pairs[3]), x[3] = second_bytes(pairs[2], pairs[3]);
}

// 16 bytes of each of 32 rows as the left operand above, at once.
EPRT_DEVICE void load_transposed(uint32_t (&x)[4], const uint8_t* my_row) {
  asm volatile(
      "{ .reg .b32 a, b, c, d;"
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {a, b, c, d}, [%4];"
      "prmt.b32 %0, a, b, 0x6420; prmt.b32 %1, a, b, 0x7531; prmt.b32 %2, c, d, 0x6420; prmt.b32 %3, c, d, 0x7531; }"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
      : "r"(shared_address(my_row))
      : "memory");
}

}  // namespace eprt
