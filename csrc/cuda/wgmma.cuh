// Products on the tensor cores of sm_90, by a warpgroup (four warps): 64 rows of one operand by kColumns rows of the
// other, 32 columns deep, both e4m3. Operands lie in shared memory as copies through tensor maps with 128-byte swizzle
// leave them.
#pragma once
#include "bulk.cuh"
#include "wgmma_lists.cuh"

namespace eprt {

// The descriptor of 64 or more rows of 128 bytes, at a multiple of 1024. For the columns from 32 i on, add 2 i.
EPRT_DEVICE uint64_t operand(const void* rows) {
  constexpr uint64_t kEightRows = 1024 / 16, kSwizzle128 = 1;
  return uint64_t((shared_address(rows) & 0x3ffff) >> 4) | uint64_t(1) << 16 | kEightRows << 32 | kSwizzle128 << 62;
}

// d (+)= w x^T. Lane l of warp w holds row 16 w + l / 4 + 8 h and column 8 j + 2 (l % 4) + e in d[4 j + 2 h + e].
template <int kColumns>
EPRT_DEVICE void multiply(float (&d)[kColumns / 2], uint64_t w, uint64_t x, bool add);

// sums: of a thread. w, x, add: the places of these operands' names.
#define MULTIPLY_E4M3(columns, sums, w_name, x_name, add_name)                                                     \
  template <>                                                                                                      \
  EPRT_DEVICE void multiply<columns>(float (&d)[columns / 2], uint64_t w, uint64_t x, bool add) {                  \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %" add_name ", 0; wgmma.mma_async.sync.aligned.m64n" #columns \
                 "k32.f32.e4m3.e4m3 {" WGMMA_NAMES_##sums "}, %" w_name ", %" x_name ", add, 1, 1; }"              \
                 : WGMMA_SUMS_##sums                                                                               \
                 : "l"(w), "l"(x), "r"(int(add)));                                                                 \
  }

MULTIPLY_E4M3(16, 8, "8", "9", "10")
MULTIPLY_E4M3(32, 16, "16", "17", "18")
MULTIPLY_E4M3(64, 32, "32", "33", "34")
MULTIPLY_E4M3(128, 64, "64", "65", "66")

#undef MULTIPLY_E4M3

// Needed before the first product that reads what other threads wrote, or adds to registers that were written.
EPRT_DEVICE void multiply_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

EPRT_DEVICE void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all groups of products but the last N have ended.
template <int N>
EPRT_DEVICE void multiply_wait_all_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

EPRT_DEVICE void multiply_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

}  // namespace eprt
