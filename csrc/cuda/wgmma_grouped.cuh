// Products on the tensor cores of sm_90, by a warpgroup: 64 rows of one operand by kColumns rows of the other, 16
// columns deep, both bfloat16. Operands lie in shared memory as in wgmma.cuh; for the columns from 16 i on, add 2 i.
#pragma once
#include "wgmma.cuh"

namespace eprt {

// d += w x^T, added up in fp32. Which lane holds what: see multiply in wgmma.cuh.
template <int kColumns>
EPRT_DEVICE void multiply_bf16(float (&d)[kColumns / 2], uint64_t w, uint64_t x);

#define NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_1 NAMES_0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_2 NAMES_1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_3 NAMES_2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_4 NAMES_3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_5 NAMES_4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_6 NAMES_5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_7 NAMES_6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_8 NAMES_7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_9 NAMES_8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_10 NAMES_9 ", %80, %81, %82, %83, %84, %85, %86, %87"

#define EIGHT(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define VALUES_0 EIGHT(0)
#define VALUES_1 VALUES_0, EIGHT(8)
#define VALUES_2 VALUES_1, EIGHT(16)
#define VALUES_3 VALUES_2, EIGHT(24)
#define VALUES_4 VALUES_3, EIGHT(32)
#define VALUES_5 VALUES_4, EIGHT(40)
#define VALUES_6 VALUES_5, EIGHT(48)
#define VALUES_7 VALUES_6, EIGHT(56)
#define VALUES_8 VALUES_7, EIGHT(64)
#define VALUES_9 VALUES_8, EIGHT(72)
#define VALUES_10 VALUES_9, EIGHT(80)

// i: the last of the lists above that it takes. w, x: places of the operands' names.
#define MULTIPLY_BF16(columns, i, w_name, x_name)                                             \
  template <>                                                                                 \
  EPRT_DEVICE void multiply_bf16<columns>(float (&d)[columns / 2], uint64_t w, uint64_t x) {  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" NAMES_##i \
                 "}, %" w_name ", %" x_name ", 1, 1, 1, 0, 0;"                                \
                 : VALUES_##i                                                                 \
                 : "l"(w), "l"(x));                                                           \
  }

MULTIPLY_BF16(16, 0, "8", "9")
MULTIPLY_BF16(32, 1, "16", "17")
MULTIPLY_BF16(48, 2, "24", "25")
MULTIPLY_BF16(64, 3, "32", "33")
MULTIPLY_BF16(80, 4, "40", "41")
MULTIPLY_BF16(96, 5, "48", "49")
MULTIPLY_BF16(112, 6, "56", "57")
MULTIPLY_BF16(128, 7, "64", "65")
MULTIPLY_BF16(144, 8, "72", "73")
MULTIPLY_BF16(160, 9, "80", "81")
MULTIPLY_BF16(176, 10, "88", "89")

#undef MULTIPLY_BF16
#undef EIGHT

// Waits until all but the last group of products are finished.
EPRT_DEVICE void multiply_wait_all_but_last() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

}  // namespace eprt
