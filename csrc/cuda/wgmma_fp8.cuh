// Products of e4m3 on the tensor cores of sm_90 whose left operand lies in registers, and what brings bytes there
// transposed: 8-bit products take both operands only with what they sum over side by side.
#pragma once
#include "wgmma.cuh"

namespace eprt {

#define EIGHT(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// d += x y^T, 64 rows by 64 columns, 32 deep. x: lane l of warp w holds of row 16 w + l / 4 the bytes 4 (l % 4) .. + 3
// in x[0], those 16 further in x[2]; of the row 8 below the same in x[1] and x[3]. d: see multiply in wgmma.cuh.
EPRT_DEVICE void add_product_fp8(float (&d)[32], const uint32_t (&x)[4], uint64_t y) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, 1, 1, 1;"
      : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));
}

#undef EIGHT

// Four 8 x 8 matrices of 16-bit words, transposed: lane l gets words 2 (l % 4) and the next of column l / 4 of each.
// my_row: of the matrices' 32 rows, row `lane`.
EPRT_DEVICE void load_matrices_transposed(uint32_t (&pair)[4], const uint8_t* my_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3])
               : "r"(shared_address(my_row))
               : "memory");
}

// As hold in wgmma_bf16.cuh.
EPRT_DEVICE void hold_words(uint32_t (&x)[4]) {
  asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])::"memory");
}

// 16 bytes of each of 32 rows, transposed, as the left operand above. Row r of the operand's 16 rows of a warp is byte
// 2 (r % 8) + r / 8; of 16 rows, byte 4 t + 2 i + e of the operand's rows is row 8 i + 2 t + e.
EPRT_DEVICE void load_transposed(uint32_t (&x)[4], const uint8_t* my_row) {
  uint32_t pair[4];  // two bytes of two rows
  load_matrices_transposed(pair, my_row);
  x[0] = __byte_perm(pair[0], pair[1], 0x6420), x[1] = __byte_perm(pair[0], pair[1], 0x7531);
  x[2] = __byte_perm(pair[2], pair[3], 0x6420), x[3] = __byte_perm(pair[2], pair[3], 0x7531);
  hold_words(x);
}

}  // namespace eprt
