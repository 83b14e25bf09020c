// Sums of rows: bulk copies bring pieces of the rows to a warp's shared memory, several in flight at any time; its
// lanes add them up in registers. Rows are multiples of 16 bytes.
#pragma once
#include "bulk.cuh"

namespace eprt {

constexpr int kStep = kWarp * 16;  // bytes of a row that a warp reads with one instruction
constexpr int kSumSteps = 7;
constexpr int kSumBytes = kSumSteps * kStep;  // bytes of a row that are summed at once: a quarter of hidden size 7168

// Rows to be added, in order of lane.
struct Summands {
  const uint8_t* row = nullptr;  // lane k
  float weight = 0;              // lane k
  uint32_t lanes = 0;            // that have a row
};

// Loads pieces of Summands in the order in which they are added: piece by piece, within a piece row by row, the rows of
// one of the kSets after those of the other.
template <int kSlots, int kSets = 1>
struct Feed {
  Ring<kSlots> ring;
  int row_bytes;
  Summands rows[kSets];       // the current ones
  uint32_t left[kSets] = {};  // lanes whose current piece is still to be loaded
  int at = 0;                 // byte offset of the current piece
  int held = 0;               // slots that are being filled or read

  EPRT_DEVICE Feed(uint8_t* slots, uint64_t* barriers, int row_bytes, int lane)
      : ring(slots, barriers, kSumBytes, lane), row_bytes(row_bytes) {}

  EPRT_DEVICE bool done() const {
    uint32_t any = 0;
#pragma unroll
    for (int s = 0; s < kSets; ++s) any |= left[s];
    return any == 0;
  }

  EPRT_DEVICE void begin_piece() {
#pragma unroll
    for (int s = 0; s < kSets; ++s) left[s] = rows[s].lanes;
  }

  EPRT_DEVICE void begin(const Summands (&sets)[kSets]) {
#pragma unroll
    for (int s = 0; s < kSets; ++s) rows[s] = sets[s];
    at = 0;
    begin_piece();
  }

  EPRT_DEVICE void load(int lane) {
    while (!done() && held < kSlots) {
      const uint8_t* from = nullptr;
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        if (from || !left[s]) continue;
        from = pointer_of(rows[s].row, __ffs(left[s]) - 1);
        left[s] &= left[s] - 1;
      }
      ring.load(from + at, min(kSumBytes, row_bytes - at), lane);
      ++held;
      if (!done()) continue;
      at += kSumBytes;
      if (at < row_bytes) begin_piece();
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

// Adds up one piece of the rows of `lanes`; my_weight: lane k. refill(): called after each row, to load more.
template <bool kWeighted, class AnyFeed, class Refill>
EPRT_DEVICE void sum_piece(float (&sum)[kSumSteps][8], AnyFeed& feed, uint32_t lanes, float my_weight, int lane,
                           Refill refill) {
#pragma unroll 1
  for (uint32_t left = lanes; left; left &= left - 1) {
    const float weight = kWeighted ? __shfl_sync(kAllLanes, my_weight, __ffs(left) - 1) : 1.f;
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
