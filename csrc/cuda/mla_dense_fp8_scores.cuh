// Scores and weights of mla_dense_fp8.cu. Two scorers, a warpgroup each, take turns: blocks of even number, counted
// over all segments of a share, are the first one's.
//
// A query's latents are divided by a scale and rounded to e4m3 (mla_quantize.cu), its rotated part is divided by the
// same scale, as both parts of an entry are by the entry's: a score is query scale * entry scale * (product of the
// latents + product of the rotated parts), and both products add up in the same registers.
//
// A row's weights are scaled such that the largest is about 2^kTop and e4m3 holds what is up to 2^-14 of it. The scale
// passes from block to block and changes only when a score is larger by more than a factor of 2^kRise. Weights are
// multiplied by the entries' scales and rounded to e4m3; the sum that the output is divided by is that of the weights
// before.
#pragma once
#include "mla_dense_fp8_load.cuh"
#include "mla_fp8_rows.cuh"

namespace eprt {

// The compiler has the value in a register from here on.
EPRT_DEVICE void pin(float& x) { asm volatile("" : "+f"(x)); }

struct Scorer : Consumer, ScoreRows {
  uint32_t taken_over = 0;  // how often, modulo 2
  Loader loader;            // of the first warp

  EPRT_DEVICE Scorer(const MlaDecodeFp8Params& p, Shared& s, int index, int rank)
      : Consumer(p, s, index, rank), loader(p, s, rank, w) {
    row = warp * 16 + lane / 4;
    if (w == 1) stage.advance(), slot.advance();
  }

  // Sets the block's scales from the context's end on to zero: a weight of 0 does not undo a NaN.
  EPRT_DEVICE void clear_scales(int first) {
    if (first + kKeys <= known) return;
    const int i = threadIdx.x % kWarpgroup;
    if (i < kKeys && first + i >= known) *reinterpret_cast<float*>(s.stage[stage.index].scale + i * kScaleBytes) = 0.f;
    sync();
  }

  // Waits for the rows' scales of the other scorer's block in front of this one.
  EPRT_DEVICE void take_over() {
    barrier_wait(&s.raised[1 - w][warp], taken_over);
    taken_over ^= 1;
    take_scales(s.most);
  }

  // Raises the rows' scales where scores ask for it, and says so to all who add values. largest: of the lane's entries.
  // The other scorer's warp with the same rows waits for it, in its next block or at the segment's end.
  EPRT_DEVICE void raise(const float (&score)[32], float log_largest, bool begins) {
    float top[2];
    find_top(top, score, log_largest);
    if (!begins) take_over();
    float faded[2] = {1.f, 1.f};
    raise_scales(faded, top, s.most);
    tell(&s.raised[w][warp]);
    tell_faded(faded, s.fades[slot.index][warp], s.fade[slot.index]);
  }

  // Of this lane's positions, 8 j + 2 (lane % 4) + e, in scale[2 j + e].
  EPRT_DEVICE void read_scales(float (&scale)[16]) {
    const uint8_t* from = s.stage[stage.index].scale + lane % 4 * 2 * kScaleBytes;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      scale[i] = *reinterpret_cast<const float*>(from + (i / 2 * 8 + i % 2) * kScaleBytes);
      pin(scale[i]);
    }
  }

  // Loads the next own block as soon as adders are done with the one before the last.
  EPRT_DEVICE void load_next() {
    if (warp != 0) return;
    TurnOf<kStages> next = stage;
    next.advance(), next.advance();
    loader.load(next, share);
  }

  // Scores become weights, which are stored.
  EPRT_DEVICE void weigh(float (&score)[32], const float (&scale)[16], int first, bool begins) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      largest = fmaxf(largest, scale[i]);
      score[i / 2 * 4 + i % 2] *= scale[i], score[i / 2 * 4 + 2 + i % 2] *= scale[i];
    }
    mask(score, segment().request, p.all.heads, first_row(), first);
    raise(score, __log2f(largest), begins);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float base = most[h] == nothing() ? 0.f : most[h] - kTop;
      uint8_t* to = s.weights[slot.index / 2] + (row + 8 * h) * 128 + lane % 4 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 16 positions
        float y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int j = 2 * i + k / 2;
          const float weight = exp2_fast(score[4 * j + 2 * h + k % 2] * factor[h] - base);
          sum[h] += weight, y[k] = weight * scale[2 * j + k % 2];
        }
        // Slots of even number are scorer 0's.
        *reinterpret_cast<uint32_t*>(to + (w * 4 + i ^ lane / 4) * 16) = pack_fp8(y[0], y[1], y[2], y[3]);
      }
    }
  }

  // first: position of the block. begins: the segment; last: of the own blocks.
  EPRT_DEVICE void add_block(int first, bool begins, bool last) {
    float score[32];
    float scale[16];
    barrier_wait(&s.full[stage.index], stage.parity);
    multiply_keys(score, s.q, s.stage[stage.index]);
    clear_scales(first);
    read_scales(scale);
    if (kStages > 3) load_next();
    multiply_wait();
    hold(score);
    if (last && lane == 0) barrier_arrive(&s.q_empty[w]);
    barrier_wait(&s.taken[slot.index], ~slot.parity & 1);
    weigh(score, scale, first, begins);
    bulk_fence_shared();
    tell(&s.weighed[slot.index]);
    release(stage);
    if (kStages == 3) load_next();  // adders have the last block
    stage.advance(), stage.advance();
    slot.advance(), slot.advance();
  }

  // Hands over what adders divide by. ended_here: the segment's last block was an own one.
  EPRT_DEVICE void end(uint32_t segments, bool ended_here) {
    const int half = segments & 1;
    if (!ended_here) take_over();
    barrier_wait(&s.divided[half], ~(segments / 2) & 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = sum_of_quad(sum[h]);
      if (lane % 4 == 0) s.sum[half][w][row + 8 * h] = sum[h];
      if (w == 0 && lane % 4 == 0) s.last_most[half][row + 8 * h] = most[h];
    }
    tell(&s.summed[half]);
  }

  EPRT_DEVICE void run() {
    uint32_t segments = 0;
    int mine = w;  // the first own block of the segment
    if (warp == 0) {
      loader.begin(share);
      loader.load(stage, share);
    }
    for (bool first = true; next(first); first = false) {
      const int from = uniform(segment().begin), count = uniform(segment().end) - from;
      if (count <= 0) continue;
      begin_rows(p, segment().request, first_row());
      if (w == 0 && warp == 0) loader.load_queries(segment(), segments);
      barrier_wait(&s.q_full, segments & 1);
      if (mine >= count && lane == 0) barrier_arrive(&s.q_empty[w]);
#pragma unroll 1
      for (int i = mine; i < count; i += 2) add_block((from + i) * kKeys, i == 0, i + 2 >= count);
      end(segments, (count - 1 - mine) % 2 == 0);
      mine = (mine + count) % 2, ++segments;
    }
  }
};

}  // namespace eprt
