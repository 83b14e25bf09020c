// What threads of a warpgroup hold in the kernels of latent attention over an fp8 cache: rows of scores with their
// scales, and columns of the output.
#pragma once
#include "mla_fp8.cuh"
#include "softmax.cuh"
#include "wgmma_bf16.cuh"

namespace eprt {

// Starts the products of queries with a block's entries, which have come. The rotated parts come first, by themselves:
// products of different types that add to the same registers are not ordered.
EPRT_DEVICE void multiply_keys(float (&score)[32], const uint8_t (&queries)[kQueryTiles][kTileBytes],
                               const Stage& keys) {
  const uint64_t q = operand(queries), k = operand(keys.latent), k_rope = operand(keys.rope);
  multiply_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    multiply_bf16(score, q + (kQueryTiles - 1) * kTileStep + i * kColumnStep, k_rope + i * kColumnStep, i > 0);
  multiply_commit();
  multiply_wait();
  hold(score);
  multiply_fence();
#pragma unroll
  for (int tile = 0; tile < kQueryTiles - 1; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      multiply<64>(score, q + tile * kTileStep + i * kColumnStep, k + tile % kLatentTiles * kTileStep + i * kColumnStep,
                   true);
  multiply_commit();
}

// A thread has two rows, as products leave them.
struct ScoreRows {
  int row;                           // of the thread block's, the thread's first; the other is 8 below
  float most[2], sum[2], factor[2];  // of the two rows: log2 scale, sum of the own blocks' weights, of scores
  int known, all_visible;            // positions of the request, that every row of the thread block sees

  EPRT_DEVICE int quad_lane() const { return threadIdx.x % 4; }

  // first_row: the thread block's first one, of the request.
  EPRT_DEVICE void begin_rows(const MlaDecodeFp8Params& p, const Request& request, int first_row) {
    known = uniform(request.length);
    all_visible = uniform(known - request.tokens + 1 + first_row / p.all.heads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q_row = request.first_token * p.all.heads + first_row + row + 8 * h;
      factor[h] = (q_row < p.q_rows ? __ldg(p.q_scale + q_row) : 0.f) * p.softmax_scale * kLog2e;
      most[h] = nothing(), sum[h] = 0.f;
    }
  }

  // Scores of a block from position `first` on, of which a row sees what is in front of it.
  EPRT_DEVICE void mask(float (&score)[32], const Request& request, int heads, int first_row, int first) const {
    if (first + kKeys <= all_visible) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int behind = request.length - request.tokens + 1 + (first_row + row + 8 * h) / heads;
      const int visible = min(request.length, behind) - first - quad_lane() * 2;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (i / 2 * 8 + i % 2 >= visible) score[i / 2 * 4 + 2 * h + i % 2] = nothing();
    }
  }

  // The largest of the lane's scores, times the largest of its entries' scales: a logarithm.
  EPRT_DEVICE void find_top(float (&top)[2], const float (&score)[32], float log_largest) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(score[2 * h], score[2 * h + 1]);
#pragma unroll
      for (int j = 1; j < 8; ++j) top[h] = fmaxf(top[h], fmaxf(score[4 * j + 2 * h], score[4 * j + 2 * h + 1]));
      top[h] = top[h] * factor[h] + log_largest;
    }
  }

  // Raises the rows' scales where scores ask for it. faded: what sums are multiplied by; before: 1.
  EPRT_DEVICE void raise_scales(float (&faded)[2], const float (&top)[2], float (&shared_most)[kRows]) {
    // Not ">=": a row without a scale asks for one.
    if (!__any_sync(kAllLanes, !(top[0] < most[0] + kRise && top[1] < most[1] + kRise))) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = most[h], largest = largest_of_quad(top[h]);
      if (largest > before + kRise) most[h] = largest;
      faded[h] = fade(before, most[h]);
      sum[h] *= faded[h];
      if (quad_lane() == 0) shared_most[row + 8 * h] = most[h];
    }
  }

  // Tells all who add values. fades: of the warp.
  EPRT_DEVICE void tell_faded(const float (&faded)[2], int32_t& fades, float (&fade)[kRows]) const {
    const bool any = __any_sync(kAllLanes, faded[0] != 1.f || faded[1] != 1.f);
    if (threadIdx.x % kWarp == 0) fades = any;
    if (quad_lane() == 0) fade[row] = faded[0], fade[row + 8] = faded[1];
  }

  // Goes on with the scales that the other warpgroup has raised.
  EPRT_DEVICE void take_scales(const float (&shared_most)[kRows]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float now = shared_most[row + 8 * h];
      sum[h] *= fade(most[h], now), most[h] = now;
    }
  }
};

// Columns 16 m + 2 (lane / 4) + h of a warp's 64 columns, of the rows 8 j + 2 (lane % 4) + e, are in
// out[m][4 j + 2 h + e].
struct OutputColumns {
  float out[4][32];

  EPRT_DEVICE int lane() const { return threadIdx.x % kWarp; }

  EPRT_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i / 32][i % 32] = 0.f;
  }

  EPRT_DEVICE void hold_all() {
#pragma unroll
    for (int m = 0; m < 4; ++m) hold(out[m]);
  }

  // Lowers the sums to the scales of a block. fades: whether any of a warp's rows has another.
  EPRT_DEVICE void rescale(const int32_t (&fades)[4], const float (&fade)[kRows]) {
    if (!(fades[0] | fades[1] | fades[2] | fades[3])) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(&fade[8 * j + lane() % 4 * 2]);
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) out[m][4 * j + 2 * h] *= by.x, out[m][4 * j + 2 * h + 1] *= by.y;
    }
  }

  // Multiplies by 1 / sum of the weights.
  EPRT_DEVICE void divide(const float (&sums)[2][kRows]) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * j + lane() % 4 * 2 + e;
        const float all = sums[0][at] + sums[1][at], by = all > 0.f ? 1.f / all : 0.f;
#pragma unroll
        for (int m = 0; m < 4; ++m) out[m][4 * j + e] *= by, out[m][4 * j + 2 + e] *= by;
      }
  }

  // to: fp32, column 0 of the warp's columns of the thread block's first row.
  EPRT_DEVICE void store_partial(float* to) const {
    to += lane() % 4 * 2 * kLatent + lane() / 4 * 2;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          *reinterpret_cast<float2*>(to + (8 * j + e) * kLatent + 16 * m) = {out[m][4 * j + e], out[m][4 * j + 2 + e]};
  }

  // to: bf16, as of store_partial. rows: from there to the request's end.
  // Four lanes hold 8 columns of a row, two each, in each of 4 groups of columns. They exchange them, so that each has
  // all 8 of one group.
  EPRT_DEVICE void store(uint16_t* to, int rows) const {
    const int group = lane() / 4 % 4, first = lane() % 4 * 2;
    to += first * kLatent + group * 16 + lane() / 16 * 8;
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
};

// Where the warpgroup w of two that share the columns of the output puts what a warp has.
EPRT_DEVICE int first_column(int w, int warp) { return w * 256 + warp * 64; }

EPRT_DEVICE float* partial_at(const MlaDecodeFp8Params& p, int share, const Segment& segment, int rank) {
  const int64_t first = int64_t(partial_slot(share, segment.begin == 0)) * kGroupRows + rank * kRows;
  return p.partial + first * kLatent;
}

EPRT_DEVICE uint16_t* output_at(const MlaDecodeFp8Params& p, const Request& request, int first_row) {
  return p.out + (int64_t(request.first_token) * p.all.heads + first_row) * kLatent;
}

EPRT_DEVICE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  bulk_fence_shared();
}

}  // namespace eprt
