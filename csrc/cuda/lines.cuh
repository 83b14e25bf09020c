// Lines: 128 bytes that tell by themselves whether they have arrived, so what is sent in lines needs no release, no
// flag and no second look.
//
// Eight neighbouring lanes of a warp store a line, 16 bytes each; the last four bytes are the epoch. One instruction of
// a warp writes a line over NVLink, and reads it, as a whole. That is the GPU's behaviour and not PTX's promise; NCCL's
// protocol LL128 rests on it too. tests/gpu/test_lines.py looks for torn lines.
#pragma once
#include "common.cuh"

namespace eprt {

constexpr int kLineBytes = 128;
constexpr int kLineLanes = kLineBytes / 16;
constexpr int kLineVectors = kLineLanes - 1;      // of payload; the last lane has 12 more bytes, and the epoch
constexpr int kWarpLines = kWarp / kLineLanes;    // lines that a warp stores with one instruction
constexpr int kWarpLineBytes = kWarpLines * kLineBytes;

// The lane that has the epoch of its line.
EPRT_DEVICE bool ends_line(int lane) { return lane % kLineLanes == kLineVectors; }

// Called by all lanes of a warp; lanes of lines that are not to be stored pass null.
EPRT_DEVICE void store_line(uint8_t* p, const Vec16& v) {
  if (p)
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
                 "r"(v.w[3])
                 : "memory");
}

// Called by all lanes of a warp. What the lane gets counts only if the lane that ends the line gets this epoch.
EPRT_DEVICE Vec16 load_line(const uint8_t* p, uint32_t epoch) {
  Vec16 v;
  asm volatile("ld.relaxed.sys.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}

// Whether the lane sees that a line is missing.
EPRT_DEVICE bool lacks_line(const Vec16& v, uint32_t epoch, int lane) { return ends_line(lane) && v.w[3] != epoch; }

}  // namespace eprt
