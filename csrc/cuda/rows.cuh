// Rows in registers: a warp copies a row, or adds several up, with as many loads under way as its registers hold. What
// it reads may have been written by a peer during this kernel. Rows are multiples of 16 bytes.
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

// kBatch steps at byte `at` of a row; kTail: one step that may reach beyond its end.
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

// To the rows `to` of all lanes in the set `bits`.
EPRT_DEVICE void copy_row(const uint8_t* from, int row_bytes, const uint8_t* to, uint32_t bits, int lane) {
  constexpr int kBatch = 14;
  int at = lane * 16;
#pragma unroll 1
  for (; at - lane * 16 + kBatch * kStep <= row_bytes; at += kBatch * kStep)
    copy_steps<kBatch, false>(from, at, row_bytes, to, bits);
#pragma unroll 1
  for (; at - lane * 16 < row_bytes; at += kStep) copy_steps<1, true>(from, at, row_bytes, to, bits);
}

// Rounds after the product and after the sum: the same bits as the CPU's.
template <bool kWeighted>
EPRT_DEVICE void add(float (&sum)[8], const Vec16& v, float weight) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float lo = bf16_lo(v.w[i]), hi = bf16_hi(v.w[i]);
    sum[2 * i] = __fadd_rn(sum[2 * i], kWeighted ? __fmul_rn(weight, lo) : lo);
    sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], kWeighted ? __fmul_rn(weight, hi) : hi);
  }
}

EPRT_DEVICE Vec16 rounded(const float (&sum)[8]) {
  Vec16 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) v.w[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
  return v;
}

// Rows to be added, one for each set bit, in order; in shared memory, one per warp: as values of lanes they would cost
// shuffles at every step.
struct Summands {
  const uint8_t* row[kWarp];
  float weight[kWarp];
};

template <bool kWeighted, int kRows, int kBatch, bool kTail>
EPRT_DEVICE void sum_steps(const Summands& summands, uint32_t bits, int at, int row_bytes, uint8_t* to) {
  const bool inside = !kTail || at < row_bytes;
  float sum[kBatch][8] = {};
#pragma unroll 1
  while (bits) {
    Vec16 v[kRows][kBatch];
    float weight[kRows];
    const int n = __popc(bits);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int from = (__ffs(bits) - 1) & (kWarp - 1);
      bits &= bits - 1;
      load_steps<kBatch>(v[j], j < n && inside, summands.row[from] + at);
      weight[j] = kWeighted ? summands.weight[from] : 1.f;
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j >= n) break;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) add<kWeighted>(sum[i], v[j][i], weight[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i)
    if (inside) *reinterpret_cast<Vec16*>(to + at + i * kStep) = rounded(sum[i]);
}

// The fp32 sum of the bf16 rows of all set bits, from byte `begin` to `end` of each, each times its weight; rounded
// once. to: where the sum's byte `begin` goes, in global or shared memory. kBatch steps of each of kRows rows are under
// way.
template <bool kWeighted, int kRows, int kBatch>
EPRT_DEVICE void sum_rows(const Summands& summands, uint32_t bits, int begin, int end, uint8_t* to, int lane) {
  int at = begin;
#pragma unroll 1
  for (; at + kBatch * kStep <= end; at += kBatch * kStep)
    sum_steps<kWeighted, kRows, kBatch, false>(summands, bits, at + lane * 16, end, to - begin);
#pragma unroll 1
  for (; at < end; at += kStep) sum_steps<kWeighted, kRows, 1, true>(summands, bits, at + lane * 16, end, to - begin);
}

}  // namespace eprt
