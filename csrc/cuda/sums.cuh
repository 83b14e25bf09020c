// Sums of rows: a warp's bulk copies bring pieces of them to shared memory, several under way at any time; its lanes
// add them up in registers. Rows are multiples of 16 bytes.
#pragma once
#include "bulk.cuh"
#include "rows.cuh"

namespace eprt {

constexpr int kSumSteps = 7;
constexpr int kSumBytes = kSumSteps * kStep;  // of a row, summed at once; a row of hidden size 7168 is four times this

// Rows to be added, in order of lane.
struct Summands {
  const uint8_t* row;  // lane k
  float weight;        // lane k
  uint32_t lanes;      // that have a row
};

// Brings pieces of Summands in the order in which they are added: piece by piece, in each the rows in order.
template <int kSlots>
struct Feed {
  Ring<kSlots> ring;
  int row_bytes;
  const uint8_t* row = nullptr;
  uint32_t lanes = 0, left = 0;
  int at = 0;
  int held = 0;  // slots that are being filled, or still read

  EPRT_DEVICE Feed(uint8_t* slots, uint64_t* barriers, int row_bytes, int lane)
      : ring(slots, barriers, kSumBytes, lane), row_bytes(row_bytes) {}

  EPRT_DEVICE bool done() const { return left == 0; }

  EPRT_DEVICE void begin(const Summands& rows) { row = rows.row, lanes = left = rows.lanes, at = 0; }

  EPRT_DEVICE void load(int lane) {
    while (left && held < kSlots) {
      ring.load(pointer_of(row, __ffs(left) - 1) + at, min(kSumBytes, row_bytes - at), lane);
      ++held;
      left &= left - 1;
      if (left) continue;
      at += kSumBytes;
      if (at < row_bytes) left = lanes;
    }
  }

  EPRT_DEVICE const uint8_t* take() { return ring.take(); }
  EPRT_DEVICE void give_back() { --held; }
};

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

// Adds up one piece of all rows. refill(): after each, so that others come.
template <bool kWeighted, int kSlots, class Refill>
EPRT_DEVICE void sum_piece(float (&sum)[kSumSteps][8], Feed<kSlots>& feed, const Summands& rows, int lane,
                           Refill refill) {
#pragma unroll 1
  for (uint32_t left = rows.lanes; left; left &= left - 1) {
    const float weight = kWeighted ? __shfl_sync(kAllLanes, rows.weight, __ffs(left) - 1) : 1.f;
    const uint8_t* piece = feed.take() + lane * 16;  // what lies beyond the end of a row, nobody puts anywhere
#pragma unroll
    for (int i = 0; i < kSumSteps; ++i)
      add<kWeighted>(sum[i], *reinterpret_cast<const Vec16*>(piece + i * kStep), weight);
    __syncwarp();
    feed.give_back();
    refill();
  }
}

// The piece's sum, rounded once, to global or shared memory.
EPRT_DEVICE void put_piece(uint8_t* to, const float (&sum)[kSumSteps][8], int bytes, int lane) {
#pragma unroll
  for (int i = 0; i < kSumSteps; ++i)
    if (i * kStep + lane * 16 < bytes) *reinterpret_cast<Vec16*>(to + i * kStep + lane * 16) = rounded(sum[i]);
}

}  // namespace eprt
