// What both sides of a low-latency combine do with rows: load and store parts of them, sum them in fp32, and await
// those that other ranks send.
#pragma once
#include "low_latency_combine.cuh"

namespace eprt::low_latency {

using Part = Vec16[kPartFours];

struct Sum {
  float v[kPartFours][8];
};

// Rounds after the product and after the sum, so the result has the same bits as on CPUs.
EPRT_DEVICE void add_weighted(Sum& sum, const Vec16* part, float weight) {
#pragma unroll
  for (int i = 0; i < kPartFours; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum.v[i][2 * j] = __fadd_rn(sum.v[i][2 * j], __fmul_rn(weight, bf16_lo(part[i].w[j])));
      sum.v[i][2 * j + 1] = __fadd_rn(sum.v[i][2 * j + 1], __fmul_rn(weight, bf16_hi(part[i].w[j])));
    }
}

EPRT_WIRED(EPRT_DEVICE void add_sum(Sum& sum, const Sum& more) {
  for (int i = 0; i < kPartFours; ++i)
    for (int j = 0; j < 8; ++j) sum.v[i][j] = __fadd_rn(sum.v[i][j], more.v[i][j]);
})

EPRT_DEVICE void round_sum(Part& part, const Sum& sum) {
#pragma unroll
  for (int i = 0; i < kPartFours; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) part[i].w[j] = pack_bf16(sum.v[i][2 * j], sum.v[i][2 * j + 1]);
}

// The lane's i-th vector of a part of a row, or -1.
EPRT_DEVICE int vector_of_part(int part, int i, int lane) {
  const int vector = (part * kPartFours + i) * kFourVectors + vector_of_four(lane);
  return part * kPartFours + i < kRowFours && lane != kWarp - 1 && vector < kRowVectors ? vector : -1;
}

// Loads a part of a plain row; nothing if it is null. kWrittenMeanwhile: it may have been written since this kernel
// started.
template <bool kWrittenMeanwhile>
EPRT_DEVICE void load_part(Vec16* to, const uint8_t* row, int part, int lane) {
#pragma unroll
  for (int i = 0; i < kPartFours; ++i) {
    const int vector = vector_of_part(part, i, lane);
    load_if<kWrittenMeanwhile>(to[i], row && vector >= 0 ? row + vector * 16 : nullptr);
  }
}

// row: in lines.
EPRT_DEVICE void send_lines(uint8_t* row, const Part& from, int part, uint32_t epoch, int lane) {
#pragma unroll
  for (int i = 0; i < kPartFours; ++i) {
    const int four = part * kPartFours + i;
    store_line(four < kRowFours ? row + four * kWarpLineBytes + lane * 16 : nullptr, pack_line(from[i], epoch, lane));
  }
}

// The sum of weight(b) * row(b) over the set bits b of `wanted`, in order. The next row is loaded while one is added;
// `meanwhile` runs while the first one is loaded. A loop, not unrolled: instructions come from memory, too.
template <bool kWrittenMeanwhile, class Row, class Weight, class Meanwhile>
EPRT_DEVICE Sum sum_rows(uint32_t wanted, int part, int lane, Row row, Weight weight, Meanwhile meanwhile) {
  Sum sum = {};
  if (wanted == 0) return sum;
  Part next = {};
  load_part<kWrittenMeanwhile>(next, row(__ffs(wanted) - 1), part, lane);
  meanwhile();
#pragma unroll 1
  while (wanted) {
    Part now;
#pragma unroll
    for (int i = 0; i < kPartFours; ++i) now[i] = next[i];
    const int b = __ffs(wanted) - 1;
    wanted &= wanted - 1;
    if (wanted) load_part<kWrittenMeanwhile>(next, row(__ffs(wanted) - 1), part, lane);
    add_weighted(sum, now, weight(b));
  }
  return sum;
}

// Into a part of a plain row.
EPRT_DEVICE void store_sum(uint8_t* to, const Sum& sum, int part, int lane) {
  Part rounded;
  round_sum(rounded, sum);
#pragma unroll
  for (int i = 0; i < kPartFours; ++i) {
    const Vec16 v = unpack_line(rounded[i], lane);
    const int vector = vector_of_part(part, i, lane);
    if (vector >= 0) store(to + vector * 16, v);
  }
}

// What all warps know from the start.
struct Call {
  uint64_t begin_ns;
  uint32_t epoch;
  uint32_t masked;  // a bit per rank
  EPRT_WIRED(uint32_t dispatch_epoch;)
};

// Lane r: the combine row of the token that rank r fills. holder: lane k: the rank of entry k, or -1.
EPRT_DEVICE int row_of_rank(int holder, int lane) {
  if (kRowIsRank) return lane EPRT_WIRED(% kRowRanks);
  int row = 0;
#pragma unroll
  for (int k = kTopk - 1; k >= 0; --k)
    if (__shfl_sync(kAllLanes, holder, k) == lane) row = k;
  return row;
}

// Rows of a token that a warp awaits and sums together.
constexpr int kAwaitedRows = kRows < 2 ? kRows : 2;

struct AwaitedRows {
  Vec16 v[kAwaitedRows * kPartFours] = {};
  int peer[kAwaitedRows] = {};            // that sends the row
  const uint8_t* row[kAwaitedRows] = {};  // in lines
  float weight[kAwaitedRows] = {};
  uint32_t rows = 0;  // a bit for each that there is

#ifdef NODE_RANKS
  int number[kAwaitedRows] = {};  // of the row among the token's

  EPRT_DEVICE void await_words(const Context& c, WaitBook* book, uint32_t epoch, int token, int lane) {
    for (int i = 0; i < kAwaitedRows; ++i)
      if ((rows >> i) & 1 && !await_row(c, book, epoch, peer[i], token, number[i], lane)) rows &= ~(1u << i);
  }
#endif

  static constexpr uint32_t kRowBits = (1u << kPartFours) - 1;

  // Waits until all rows are here, but those of masked and late ranks, which are then none of `rows`.
  EPRT_DEVICE void wait(const Context& c, WaitBook* book, int part, uint32_t epoch, int lane) {
    const int fours = min(kPartFours, kRowFours - part * kPartFours);
    const auto line = [&](int i) {
      return row[i / kPartFours] + (part * kPartFours + i % kPartFours) * kWarpLineBytes + lane * 16;
    };
    uint32_t missing = 0;
#pragma unroll
    for (int i = 0; i < kAwaitedRows; ++i)
      if ((rows >> i) & 1) missing |= ((1u << fours) - 1) << (i * kPartFours);
    uint32_t awaited = look_for_lines(v, missing, line, epoch, lane);
    const uint64_t start = awaited ? global_timer_ns() : 0;
    for (int look = 1; awaited; ++look) {
      const uint64_t now = global_timer_ns();  // before the look, see WaitEnd
      const uint32_t before = awaited;
      awaited = look_for_lines(v, missing, line, epoch, lane);
#pragma unroll
      for (int i = 0; i < kAwaitedRows; ++i) {
        const uint32_t bits = kRowBits << (i * kPartFours);
        if (!(before & bits)) continue;
        const bool arrived = !(awaited & bits);
        if (!arrived && look % 64) continue;
        const uint32_t there = arrived ? epoch : seen(i, missing);
        const PeerState state = judge_peer(c.deadline, book, peer[i], arrived, start, now, kCombineRows, there, epoch);
        if (state == kMasked || state == kLate) rows &= ~(1u << i), missing &= ~bits, awaited &= ~bits;
      }
    }
  }
  // The epoch in a line that row i lacks.
  EPRT_DEVICE uint32_t seen(int i, uint32_t missing) const {
    uint32_t epoch = 0;
#pragma unroll
    for (int j = 0; j < kPartFours; ++j)
      if ((missing >> (i * kPartFours + j)) & 1) epoch = v[i * kPartFours + j].w[3];
    const uint32_t lanes = __ballot_sync(kAllLanes, (missing >> (i * kPartFours)) & kRowBits && ends_line(threadIdx.x));
    return __shfl_sync(kAllLanes, epoch, __ffs(lanes) - 1);
  }
};

}  // namespace eprt::low_latency
