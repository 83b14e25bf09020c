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

// A warp has the columns from first_column(w, warp) on.
struct Adder : Consumer, OutputColumns {
  using Consumer::lane;

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
      rescale(s.fades[slot.index], s.fade[slot.index]);
      hold_all();
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
      hold_all();
      tell(&s.taken[slot.index]);
      slot.advance();
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

  EPRT_DEVICE void run() {
    const int column = first_column(w, warp);
    uint32_t segments = 0;
    for (bool first = true; next(first); first = false) {
      const int from = uniform(segment().begin), count = uniform(segment().end) - from;
      const int half = segments & 1;
      const bool whole = segment().whole();
      clear();
      if (count > 0) {
        add_blocks(count, uniform(segment().request.length) - from * kKeys);
        barrier_wait(&s.summed[half], segments / 2 & 1);
        divide(s.sum[half]);
      }
      if (w == 0 && !whole) store_log_sum(half, count <= 0);
      if (count > 0) {
        tell(&s.divided[half]);
        ++segments;
      }
      if (whole)
        store(output_at(p, segment().request, first_row()) + column,
              segment().request.tokens * p.all.heads - first_row());
      else
        store_partial(partial_at(p, share, segment(), rank) + column);
    }
  }
};

}  // namespace eprt
