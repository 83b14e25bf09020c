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
#include "softmax.cuh"
#include "wgmma_bf16.cuh"

namespace eprt {

// The compiler has the value in a register from here on.
EPRT_DEVICE void pin(float& x) { asm volatile("" : "+f"(x)); }

// A thread has two rows, as products leave them.
struct Scorer : Consumer {
  int row;                           // of the thread block's, the thread's first; the other is 8 below
  float most[2], sum[2], factor[2];  // of the two rows: log2 scale, sum of the own blocks' weights, of scores
  int known, all_visible;            // positions of the request, that every row of the thread block sees
  uint32_t taken_over = 0;           // how often, modulo 2
  Loader loader;                     // of the first warp

  EPRT_DEVICE Scorer(const MlaDecodeFp8Params& p, Shared& s, int index, int rank)
      : Consumer(p, s, index, rank), row(warp * 16 + lane / 4), loader(p, s, rank, w) {
    if (w == 1) stage.advance(), slot.advance();
  }

  EPRT_DEVICE void begin() {
    const Request& request = segment().request;
    const int first = first_row();
    known = uniform(request.length);
    all_visible = uniform(known - request.tokens + 1 + first / p.all.heads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q_row = request.first_token * p.all.heads + first + row + 8 * h;
      factor[h] = (q_row < p.q_rows ? __ldg(p.q_scale + q_row) : 0.f) * p.softmax_scale * kLog2e;
      most[h] = nothing(), sum[h] = 0.f;
    }
  }

  // Starts the products of the stage's block. The rotated parts come first, by themselves:
  // products of different types that add to the same registers are not ordered.
  EPRT_DEVICE void multiply_keys(float (&score)[32]) {
    const Stage& keys = s.stage[stage.index];
    const uint64_t q = operand(s.q), k = operand(keys.latent), k_rope = operand(keys.rope);
    barrier_wait(&s.full[stage.index], stage.parity);
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
        multiply<64>(score, q + tile * kTileStep + i * kColumnStep,
                     k + tile % kLatentTiles * kTileStep + i * kColumnStep, true);
    multiply_commit();
  }

  // Sets the block's scales from the context's end on to zero: a weight of 0 does not undo a NaN.
  EPRT_DEVICE void clear_scales(int first) {
    if (first + kKeys <= known) return;
    const int i = threadIdx.x % kWarpgroup;
    if (i < kKeys && first + i >= known) *reinterpret_cast<float*>(s.stage[stage.index].scale + i * kScaleBytes) = 0.f;
    sync();
  }

  EPRT_DEVICE void mask(float (&score)[32], int first) {
    if (first + kKeys <= all_visible) return;
    const Request& request = segment().request;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int behind = request.length - request.tokens + 1 + (first_row() + row + 8 * h) / p.all.heads;
      const int visible = min(request.length, behind) - first - lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (i / 2 * 8 + i % 2 >= visible) score[i / 2 * 4 + 2 * h + i % 2] = nothing();
    }
  }

  // Waits for the rows' scales of the other scorer's block in front of this one.
  EPRT_DEVICE void take_over() {
    barrier_wait(&s.raised[1 - w][warp], taken_over);
    taken_over ^= 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float now = s.most[row + 8 * h];
      sum[h] *= fade(most[h], now), most[h] = now;
    }
  }

  // Raises the rows' scales where scores ask for it, and says so to all who add values. largest: of the lane's entries.
  // The other scorer's warp with the same rows waits for it, in its next block or at the segment's end.
  EPRT_DEVICE void raise(const float (&score)[32], float log_largest, bool begins) {
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = fmaxf(score[2 * h], score[2 * h + 1]);
#pragma unroll
      for (int j = 1; j < 8; ++j) top[h] = fmaxf(top[h], fmaxf(score[4 * j + 2 * h], score[4 * j + 2 * h + 1]));
      top[h] = top[h] * factor[h] + log_largest;
    }
    if (!begins) take_over();
    float faded[2] = {1.f, 1.f};
    // Not ">=": a row without a scale asks for one.
    if (__any_sync(kAllLanes, !(top[0] < most[0] + kRise && top[1] < most[1] + kRise))) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float before = most[h], largest = largest_of_quad(top[h]);
        if (largest > before + kRise) most[h] = largest;
        faded[h] = fade(before, most[h]);
        sum[h] *= faded[h];
        if (lane % 4 == 0) s.most[row + 8 * h] = most[h];
      }
    }
    tell(&s.raised[w][warp]);
    const bool fades = __any_sync(kAllLanes, faded[0] != 1.f || faded[1] != 1.f);
    if (lane == 0) s.fades[slot.index][warp] = fades;
    if (lane % 4 == 0) s.fade[slot.index][row] = faded[0], s.fade[slot.index][row + 8] = faded[1];
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
    mask(score, first);
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
    multiply_keys(score);
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
      begin();
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
