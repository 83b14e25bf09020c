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

#define EIGHT(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define THIRTY_TWO(i) EIGHT(i), EIGHT(i + 8), EIGHT(i + 16), EIGHT(i + 24)

// d (+)= x y^T, 64 columns; both operands in shared memory. Lane l of warp w holds row 16 w + l / 4 + 8 h and column
// 8 j + 2 (l % 4) + e in d[4 j + 2 h + e].
EPRT_DEVICE void multiply_bf16(float (&d)[32], uint64_t x, uint64_t y, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %34, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, add, 1, 1, 0, 0; }"
      : THIRTY_TWO(0)
      : "l"(x), "l"(y), "r"(int(add)));
}

// d += x y, 256 columns, for a transposed operand y; x in shared memory.
EPRT_DEVICE void add_product(float (&d)[128], uint64_t x, uint64_t y) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %130, 0;"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
      "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "
      "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "
      "%118, %119, "
      "%120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, add, 1, 1, 0, 1; }"
      : THIRTY_TWO(0), THIRTY_TWO(32), THIRTY_TWO(64), THIRTY_TWO(96)
      : "l"(x), "l"(y), "r"(1));
}

// The same; x in registers: rows and columns as in d, two bfloat16 a word.
EPRT_DEVICE void add_product(float (&d)[128], const uint32_t* x, uint64_t y) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %133, 0;"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
      "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "
      "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "
      "%118, %119, "
      "%120, %121, %122, %123, %124, %125, %126, %127"
      "}, {%128, %129, %130, %131}, %132, add, 1, 1, 1; }"
      : THIRTY_TWO(0), THIRTY_TWO(32), THIRTY_TWO(64), THIRTY_TWO(96)
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "r"(1));
}

#undef THIRTY_TWO
#undef EIGHT

// Waits until all groups of products but the last N have ended.
template <int N>
EPRT_DEVICE void multiply_wait_all_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving uses of these registers across this place: it does not know that products write them
// until they are waited for.
template <int N>
EPRT_DEVICE void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

}  // namespace eprt
