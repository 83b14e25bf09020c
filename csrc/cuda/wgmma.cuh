// Products on the tensor cores of sm_90, by a warpgroup (four warps): 64 rows of one operand by kColumns rows of the
// other, 32 columns deep, both e4m3. Operands lie in shared memory as copies through tensor maps with 128-byte swizzle
// leave them.
#pragma once
#include "bulk.cuh"

namespace eprt {

// The descriptor of 64 or more rows of 128 bytes, at a multiple of 1024. For the columns from 32 i on, add 2 i.
EPRT_DEVICE uint64_t operand(const void* rows) {
  constexpr uint64_t kEightRows = 1024 / 16, kSwizzle128 = 1;
  return uint64_t((shared_address(rows) & 0x3ffff) >> 4) | uint64_t(1) << 16 | kEightRows << 32 | kSwizzle128 << 62;
}

// d (+)= w x^T. Lane l of warp w holds row 16 w + l / 4 + 8 h and column 8 j + 2 (l % 4) + e in d[4 j + 2 h + e].
template <int kColumns>
EPRT_DEVICE void multiply(float (&d)[kColumns / 2], uint64_t w, uint64_t x, bool add);

#define EIGHT(i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

template <>
EPRT_DEVICE void multiply<16>(float (&d)[8], uint64_t w, uint64_t x, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %10, 0;"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, %8, %9, add, 1, 1; }"
      : EIGHT(0)
      : "l"(w), "l"(x), "r"(int(add)));
}

template <>
EPRT_DEVICE void multiply<32>(float (&d)[16], uint64_t w, uint64_t x, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %18, 0;"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, add, 1, 1; }"
      : EIGHT(0), EIGHT(8)
      : "l"(w), "l"(x), "r"(int(add)));
}

template <>
EPRT_DEVICE void multiply<64>(float (&d)[32], uint64_t w, uint64_t x, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %34, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, add, 1, 1; }"
      : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24)
      : "l"(w), "l"(x), "r"(int(add)));
}

template <>
EPRT_DEVICE void multiply<128>(float (&d)[64], uint64_t w, uint64_t x, bool add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %66, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, add, 1, 1; }"
      : EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48), EIGHT(56)
      : "l"(w), "l"(x), "r"(int(add)));
}

#undef EIGHT

// Needed before the first product that reads what other threads wrote, or adds to registers that were written.
EPRT_DEVICE void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

EPRT_DEVICE void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

EPRT_DEVICE void multiply_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

}  // namespace eprt
