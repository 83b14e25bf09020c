// A warp copies a row to several places through registers, with as many loads in flight as registers hold. A peer may
// have written the row during this kernel. Rows are multiples of 16 bytes.
#pragma once
#include "common.cuh"

namespace eprt {

// The value of lane `from` (of a pointer).
EPRT_DEVICE uint8_t* pointer_of(const uint8_t* mine, int from) {
  return reinterpret_cast<uint8_t*>(__shfl_sync(kAllLanes, uint64_t(mine), from));
}

constexpr int kStep = kWarp * 16;  // bytes of a row that a warp loads with one instruction

template <int kBatch>
EPRT_DEVICE void load_steps(Vec16 (&v)[kBatch], bool wanted, const uint8_t* from) {
  if constexpr (kBatch > 1) load_steps<kBatch - 1>(reinterpret_cast<Vec16(&)[kBatch - 1]>(v), wanted, from);
  v[kBatch - 1] = load_peer_written_if<(kBatch - 1) * kStep>(wanted, from);
}

// Copies kBatch steps at byte `at` of a row; kTail: one step, which may reach past the end of the row.
template <int kBatch, bool kTail>
EPRT_DEVICE void copy_steps(const uint8_t* from, int at, int row_bytes, const uint8_t* to, uint32_t bits) {
  const bool inside = !kTail || at < row_bytes;
  Vec16 v[kBatch];
  load_steps<kBatch>(v, inside, from + at);
  for (uint32_t left = bits; left; left &= left - 1) {
    uint8_t* row = pointer_of(to, __ffs(left) - 1) + at;
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (inside) store(row + i * kStep, v[i]);
  }
}

// Copies a row to the rows `to` of all lanes in the set `bits`.
EPRT_DEVICE void copy_row(const uint8_t* from, int row_bytes, const uint8_t* to, uint32_t bits, int lane) {
  constexpr int kBatch = 14;
  int at = lane * 16;
#pragma unroll 1
  for (; at - lane * 16 + kBatch * kStep <= row_bytes; at += kBatch * kStep)
    copy_steps<kBatch, false>(from, at, row_bytes, to, bits);
#pragma unroll 1
  for (; at - lane * 16 < row_bytes; at += kStep) copy_steps<1, true>(from, at, row_bytes, to, bits);
}

}  // namespace eprt
