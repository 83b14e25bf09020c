// The output of mla_dense_fp8.cu: two adders, a warpgroup each, add the values of all blocks, times their weights, to
// half of the columns.
//
// 8-bit products want positions side by side in both operands, but entries lie one below the other. So the output is
// computed transposed, values^T x weights^T: its left operand may come from registers, and it is transposed on the way
// there. Weights are stored in the order of positions that this leaves.
#pragma once
#include "mla_dense_fp8_scores.cuh"
#include "wgmma_fp8.cuh"

namespace eprt {

// Values of 32 positions on their way to products: twice 16 columns of a warp.
using Values = uint32_t[2][4];

// Products read these registers until here.
EPRT_DEVICE void keep(const Values& x) {
#pragma unroll
  for (int i = 0; i < 8; ++i) asm volatile("" ::"r"(x[i / 4][i % 4]));
}

// Columns 256 w + 64 warp + 16 m + 2 (lane / 4) + h of the rows 8 j + 2 (lane % 4) + e are in out[m][4 j + 2 h + e].
struct Adder : Consumer {
  float out[4][32];

  EPRT_DEVICE Adder(const MlaDecodeFp8Params& p, Shared& s, int index, int rank) : Consumer(p, s, index, rank) {}

  // Starts to load part i of a block in the stage: columns 16 m of m = 2 (i % 2) and the next, of 32 positions.
  EPRT_DEVICE void load_values(Values& pairs, int i) {
    const uint8_t* tile = s.stage[stage.index].latent[2 * w + warp / 2] + (i / 2 * 32 + lane) * 128;
#pragma unroll
    for (int k = 0; k < 2; ++k) load_pairs(pairs[k], tile + ((warp % 2 * 4 + i % 2 * 2 + k) ^ lane % 8) * 16);
  }

  // Part i as an operand. left: positions of the request from the block's first on; those behind become zero, since a
  // weight of 0 does not undo a NaN.
  EPRT_DEVICE void arrange(Values& x, const Values& pairs, int i, int left) {
#pragma unroll
    for (int k = 0; k < 2; ++k) arrange_pairs(x[k], pairs[k]);
    if (left >= kKeys) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 16 positions, of which a word has four: see arrange_pairs
      uint32_t kept = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (32 * (i / 2) + 16 * half + 8 * (k / 2) + 2 * (lane % 4) + k % 2 < left) kept |= 0xffu << 8 * k;
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k / 2][half * 2 + k % 2] &= kept;
    }
  }

  // Starts the products of part i with its weights.
  EPRT_DEVICE void multiply_values(const Values& x, int i) {
    const uint64_t weights = operand(s.weights[slot.index / 2]) + slot.index % 2 * kHalfRow + i / 2 * kColumnStep;
    multiply_fence();
#pragma unroll
    for (int k = 0; k < 2; ++k) add_product_fp8(out[i % 2 * 2 + k], x[k], weights);
    multiply_commit();
  }

  // Lowers the sums to the scales of the slot's block.
  EPRT_DEVICE void rescale() {
    const int32_t* fades = s.fades[slot.index];
    if (!(fades[0] | fades[1] | fades[2] | fades[3])) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(&s.fade[slot.index][8 * j + lane % 4 * 2]);
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) out[m][4 * j + 2 * h] *= by.x, out[m][4 * j + 2 * h + 1] *= by.y;
    }
  }

  // While the products of a part run, the next one's values come: shared memory is busy, and answers late. The stage is
  // released when the last ones have begun: their operands have come.
  EPRT_DEVICE void add_blocks(int count, int left) {
    Values x, y, next;
    barrier_wait(&s.full[stage.index], stage.parity);
    load_values(next, 0);
#pragma unroll 1
    for (int i = 0; i < count; ++i, left -= kKeys) {
      arrange(x, next, 0, left);
      load_values(next, 1);
      barrier_wait(&s.weighed[slot.index], slot.parity);
      rescale();
#pragma unroll
      for (int m = 0; m < 4; ++m) hold(out[m]);
      multiply_values(x, 0);
      arrange(y, next, 1, left);
      load_values(next, 2);
      multiply_values(y, 1);
      multiply_wait_all_but<1>();
      keep(x);
      arrange(x, next, 2, left);
      load_values(next, 3);
      multiply_values(x, 2);
      multiply_wait_all_but<1>();
      keep(y);
      arrange(y, next, 3, left);
      multiply_values(y, 3);
      release(stage);
      stage.advance();
      if (i + 1 < count) {
        barrier_wait(&s.full[stage.index], stage.parity);
        load_values(next, 0);
      }
      multiply_wait();
      keep(x), keep(y);
#pragma unroll
      for (int m = 0; m < 4; ++m) hold(out[m]);
      tell(&s.taken[slot.index]);
      slot.advance();
    }
  }

  // Multiplies by 1 / sum of the weights.
  EPRT_DEVICE void divide(int half) {
    const float (&sums)[2][kRows] = s.sum[half];
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * j + lane % 4 * 2 + e;
        const float all = sums[0][at] + sums[1][at], by = all > 0.f ? 1.f / all : 0.f;
#pragma unroll
        for (int m = 0; m < 4; ++m) out[m][4 * j + e] *= by, out[m][4 * j + 2 + e] *= by;
      }
  }

  // Called by all threads of an adder; those of the first 64 have a row each.
  EPRT_DEVICE void store_log_sum(int half, bool empty) {
    const int64_t part = partial_slot(share, segment().begin == 0);
    const int at = threadIdx.x % kWarpgroup;
    if (at >= kRows) return;
    const float all = empty ? 0.f : s.sum[half][0][at] + s.sum[half][1][at];
    p.log_sum[part * kGroupRows + rank * kRows + at] =
        all > 0.f ? s.last_most[half][at] - kTop + __log2f(all) : nothing();
  }

  EPRT_DEVICE void store_partial() {
    const int64_t first = int64_t(partial_slot(share, segment().begin == 0)) * kGroupRows + rank * kRows;
    float* to = p.partial + (first + lane % 4 * 2) * kLatent + w * 256 + warp * 64 + lane / 4 * 2;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          *reinterpret_cast<float2*>(to + (8 * j + e) * kLatent + 16 * m) = {out[m][4 * j + e], out[m][4 * j + 2 + e]};
  }

  // Four lanes hold 8 columns of a row, two each, in each of 4 groups of columns. They exchange them, so that each has
  // all 8 of one group.
  EPRT_DEVICE void store() {
    const int first = first_row() + lane % 4 * 2, group = lane / 4 % 4;
    const int rows = segment().request.tokens * p.all.heads;
    const int64_t out_row = int64_t(segment().request.first_token) * p.all.heads + first;
    uint16_t* to = p.out + out_row * kLatent + w * 256 + warp * 64 + group * 16 + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        uint32_t word[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) word[m] = pack_bf16(out[m][4 * j + e], out[m][4 * j + 2 + e]);
        exchange(word[0], word[1], group & 1, 4), exchange(word[2], word[3], group & 1, 4);
        exchange(word[0], word[2], group & 2, 8), exchange(word[1], word[3], group & 2, 8);
        if (first + 8 * j + e < rows)
          *reinterpret_cast<Vec16*>(to + (8 * j + e) * kLatent) = Vec16{word[0], word[1], word[2], word[3]};
      }
  }

  EPRT_DEVICE void run() {
    uint32_t segments = 0;
    for (bool first = true; next(first); first = false) {
      const int from = uniform(segment().begin), count = uniform(segment().end) - from;
      const int half = segments & 1;
      const bool whole = segment().whole();
#pragma unroll
      for (int i = 0; i < 128; ++i) out[i / 32][i % 32] = 0.f;
      if (count > 0) {
        add_blocks(count, uniform(segment().request.length) - from * kKeys);
        barrier_wait(&s.summed[half], segments / 2 & 1);
        divide(half);
      }
      if (w == 0 && !whole) store_log_sum(half, count <= 0);
      if (count > 0) {
        tell(&s.divided[half]);
        ++segments;
      }
      if (whole)
        store();
      else
        store_partial();
    }
  }
};

}  // namespace eprt
