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
constexpr int kLineVectors = kLineLanes - 1;    // of payload; the last lane has 12 more bytes, and the epoch
constexpr int kWarpLines = kWarp / kLineLanes;  // lines that a warp stores with one instruction
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

// Called by all lanes of a warp; lanes of lines that are not to be loaded pass null and keep v. What a lane gets counts
// only if the lane that ends the line gets this epoch.
EPRT_DEVICE void load_line(Vec16& v, const uint8_t* p, uint32_t epoch) {
  EPRT_LOAD_IF_ASM("ld.relaxed.sys.global.L1::no_allocate.v4.u32", v, p, "memory");
}

// Loads those of N lines per lane that are missing, a bit each, from at(i), all before the first use of any. What is
// missing afterwards: for the lane in `missing`, for the whole warp as the result.
template <int N, class At>
EPRT_DEVICE uint32_t look_for_lines(Vec16 (&v)[N], uint32_t& missing, At at, uint32_t epoch, int lane) {
#pragma unroll
  for (int i = 0; i < N; ++i) load_line(v[i], (missing >> i) & 1 ? at(i) : nullptr, epoch);
  uint32_t still = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) still |= uint32_t(v[i].w[3] != epoch) << i;
  missing &= __shfl_sync(kAllLanes, still, lane | kLineVectors);
  return __reduce_or_sync(kAllLanes, missing);
}

// ---- rows in lines --------------------------------------------------------------------------------------------------
//
// Four lines, which a warp stores at once, carry 31 vectors: those of the lanes that end no line; in the last lanes of
// the first three lines one more each, but for its last word; and these three words in the very last lane.

constexpr int kFourVectors = kWarp - 1;

// The lane's vector of the 31. The last lane has none.
EPRT_DEVICE int vector_of_four(int lane) {
  return ends_line(lane) ? kWarpLines * kLineVectors + lane / kLineLanes
                         : lane / kLineLanes * kLineVectors + lane % kLineLanes;
}

// From vectors to lines, and back. Called by all lanes.
EPRT_DEVICE Vec16 pack_line(Vec16 v, uint32_t epoch, int lane) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const uint32_t last = __shfl_sync(kAllLanes, v.w[3], i * kLineLanes + kLineVectors);
    if (lane == kWarp - 1) v.w[i] = last;
  }
  if (ends_line(lane)) v.w[3] = epoch;
  return v;
}

EPRT_DEVICE Vec16 unpack_line(Vec16 v, int lane) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const uint32_t last = __shfl_sync(kAllLanes, v.w[i], kWarp - 1);
    if (lane == i * kLineLanes + kLineVectors) v.w[3] = last;
  }
  return v;
}

}  // namespace eprt
