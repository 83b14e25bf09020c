// Sums of rows: bulk copies bring pieces of the rows to a warp's shared memory, several in flight at any time; its
// lanes add them up in registers. Rows are multiples of 16 bytes.
#pragma once
#include "bulk.cuh"
#include "rows.cuh"

namespace eprt {

constexpr int kSumSteps = 7;
constexpr int kSumBytes = kSumSteps * kStep;  // bytes of a row that are summed at once: a quarter of hidden size 7168

// Rows to be added, in order of lane.
struct Summands {
  const uint8_t* row;  // lane k
  float weight;        // lane k
  uint32_t lanes;      // that have a row
};

// Loads pieces of Summands in the order in which they are added: piece by piece, within a piece row by row.
template <int kSlots>
struct Feed {
  Ring<kSlots> ring;
  int row_bytes;
  const uint8_t* row = nullptr;  // lane k: the current Summands' row
  uint32_t lanes = 0;            // that have a row
  uint32_t left = 0;             // whose current piece is still to be loaded
  int at = 0;                    // byte offset of the current piece
  int held = 0;                  // slots that are being filled or read

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

// Rounds after the product and after the sum, so the result has the same bits as on CPUs.
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

// Adds up one piece of all rows. refill(): called after each row, to load more.
template <bool kWeighted, int kSlots, class Refill>
EPRT_DEVICE void sum_piece(float (&sum)[kSumSteps][8], Feed<kSlots>& feed, const Summands& rows, int lane,
                           Refill refill) {
#pragma unroll 1
  for (uint32_t left = rows.lanes; left; left &= left - 1) {
    const float weight = kWeighted ? __shfl_sync(kAllLanes, rows.weight, __ffs(left) - 1) : 1.f;
    const uint8_t* piece = feed.take() + lane * 16;  // sums past the end of a row are undefined and never stored
#pragma unroll
    for (int i = 0; i < kSumSteps; ++i)
      add<kWeighted>(sum[i], *reinterpret_cast<const Vec16*>(piece + i * kStep), weight);
    __syncwarp();
    feed.give_back();
    refill();
  }
}

// Stores the piece's sum, rounded once, in global or shared memory.
EPRT_DEVICE void put_piece(uint8_t* to, const float (&sum)[kSumSteps][8], int bytes, int lane) {
#pragma unroll
  for (int i = 0; i < kSumSteps; ++i)
    if (i * kStep + lane * 16 < bytes) *reinterpret_cast<Vec16*>(to + i * kStep + lane * 16) = rounded(sum[i]);
}

}  // namespace eprt
