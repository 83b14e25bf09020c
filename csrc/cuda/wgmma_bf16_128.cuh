// Products of bfloat16 on the tensor cores of sm_90 with 128 columns, by a warpgroup: 64 rows of the left operand, 16
// deep. Operands and sums lie as wgmma_bf16.cuh says.
#pragma once
#include "wgmma_bf16.cuh"

namespace eprt {

#define EIGHT(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define SIXTY_FOUR EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)

// d (+)= x y^T; both operands in shared memory.
EPRT_DEVICE void multiply_bf16(float (&d)[64], uint64_t x, uint64_t y, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %66, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
      "%60, %61, %62, %63"
      "}, %64, %65, add, 1, 1, 0, 0; }"
      : SIXTY_FOUR
      : "l"(x), "l"(y), "r"(int(add)));
}

// d += x y for a transposed operand y; x in registers: rows and columns as in d, two bfloat16 a word.
EPRT_DEVICE void add_product(float (&d)[64], const uint32_t* x, uint64_t y) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %69, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
      "%60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1; }"
      : SIXTY_FOUR
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(1));
}

#undef SIXTY_FOUR
#undef EIGHT

}  // namespace eprt
