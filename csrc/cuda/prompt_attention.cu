// Attention of prompts in expanded form, bfloat16: every head has its own keys and values, computed from the latents,
// 128 columns each; the scores add 64 rotated columns, the same for all heads. Causal; a request's new tokens are the
// last of its positions.
//
// Two warpgroups compute 64 rows each of a tile of 128 (prompt_load.cuh) and walk through the positions in blocks of
// 128. They take turns at the tensor cores: a turn issues the scores of a block and the values of the block before, so
// one warpgroup computes weights while the other's products run, and its own products of values run beside them too.
//
// The first position is visible to every row, so the scale of a row's weights is finite from the first block on. It
// changes only when it grows by more than a factor of 2^kSlack, so the output is rarely rescaled.
#include "prompt_load.cuh"
#include "softmax.cuh"
#include "wgmma_bf16.cuh"

namespace eprt {

// What a thread of warpgroup w holds: two rows of its 64, as products leave them.
struct Consumer {
  const PromptParams& p;
  Shared& s;
  int w, lane, warp;
  int row;  // of the tile, the thread's first; the other is 8 below
  float scale;
  float out[64];
  float most[2], sum[2];  // of the two rows: log2 scale, sum of the weights
  uint32_t weights[32];   // of a block
  uint32_t used = 0;      // blocks before this tile
  Tile tile;

  EPRT_DEVICE Consumer(const PromptParams& p, Shared& s, int w)
      : p(p), s(s), w(w), lane(threadIdx.x % kWarp), warp(threadIdx.x / kWarp % 4), scale(p.scale * kLog2e) {
    row = w * 64 + warp * 16 + lane / 4;
  }

  EPRT_DEVICE void release(uint64_t* empty) {
    if (lane == 0) barrier_arrive(empty);
  }

  EPRT_DEVICE void begin_turn() { barrier_sync(1 + w, kConsumers); }
  EPRT_DEVICE void end_turn() { barrier_arrive(2 - w, kConsumers); }

  EPRT_DEVICE void multiply_keys(float (&score)[64], int stage) {
    constexpr uint64_t kTileStep = kTileBytes / 16, kColumnStep = 2;
    const uint64_t q = operand(s.q[0] + w * 64 * kRowBytes), k = operand(s.k[stage]);
    multiply_fence();
#pragma unroll
    for (int i = 0; i < 4 * kScores; ++i) {
      const uint64_t at = i / 4 * kTileStep + i % 4 * kColumnStep;
      multiply_bf16(score, q + at, k + at, i > 0);
    }
    multiply_commit();
  }

  EPRT_DEVICE void multiply_values(int stage) {
    constexpr uint64_t kRowStep = 16 * kRowBytes / 16;
    const uint64_t values = transposed_operand(s.v[stage], kTileBytes);
    hold(out);
    multiply_fence();
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) add_product(out, weights + 4 * i, values + i * kRowStep);
    multiply_commit();
  }

  // The weights were read by the products until now.
  EPRT_DEVICE void await_values(int stage) {
    multiply_wait();
    hold(out);
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" ::"r"(weights[i]));
    release(&s.v_empty[stage]);
  }

  // Scores that a row does not see become -inf.
  EPRT_DEVICE void mask(float (&score)[64], int block) {
    const int first = tile.seen + row - block * kKeys - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i / 4 * 8 + i % 2 >= first + i / 2 % 2 * 8) score[i] = nothing();
    }
  }

  // Scores become weights, with the scale `larger`.
  EPRT_DEVICE void weigh(float (&score)[64], float (&larger)[2], float (&part)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(score[2 * h], score[2 * h + 1]);
#pragma unroll
      for (int j = 1; j < 16; ++j) x = fmaxf(x, fmaxf(score[4 * j + 2 * h], score[4 * j + 2 * h + 1]));
      x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
      x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2)) * scale;
      larger[h] = x > most[h] + kSlack ? x : most[h];
      part[h] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      score[i] = exp2_fast(score[i] * scale - larger[i / 2 % 2]);
      part[i / 2 % 2] += score[i];
    }
    hold(score);  // else the compiler computes all of them behind the products; asked for earlier, they delay these
    hold(part);
  }

  // Takes over the weights of a block, with their scale. No products run.
  EPRT_DEVICE void keep(const float (&score)[64], const float (&larger)[2], const float (&part)[2]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) weights[i] = pack_bf16(score[2 * i], score[2 * i + 1]);
    const float low = fade(most[0], larger[0]), high = fade(most[1], larger[1]);
    most[0] = larger[0], most[1] = larger[1];
    if (__any_sync(kAllLanes, low != 1.f || high != 1.f)) {
      sum[0] *= low, sum[1] *= high;
#pragma unroll
      for (int i = 0; i < 64; ++i) out[i] *= i / 2 % 2 ? high : low;
    }
    sum[0] += part[0], sum[1] += part[1];
  }

  EPRT_DEVICE void add_first(int blocks, bool masked) {
    float score[64], larger[2], part[2];
    const int stage = used % kStages;
    barrier_wait(&s.k_full[stage], used / kStages & 1);
    begin_turn();
    multiply_keys(score, stage);
    end_turn();
    multiply_wait();
    hold(score);
    release(&s.k_empty[stage]);
    if (blocks == 1) release(&s.q_empty);
    if (masked) mask(score, 0);
    weigh(score, larger, part);
    keep(score, larger, part);
  }

  // Scores and weights of a block, values of the one before.
  template <bool kMasked>
  EPRT_DEVICE void add_block(int block, int blocks) {
    float score[64], larger[2], part[2];
    const uint32_t now = used + block, before = now - 1;
    const int stage = now % kStages;
    barrier_wait(&s.k_full[stage], now / kStages & 1);
    barrier_wait(&s.v_full[before % kStages], before / kStages & 1);
    begin_turn();
    multiply_keys(score, stage);
    multiply_values(before % kStages);
    end_turn();
    multiply_wait_all_but<1>();
    hold(score);
    release(&s.k_empty[stage]);
    if (block + 1 == blocks) release(&s.q_empty);
    if (kMasked) mask(score, block);
    weigh(score, larger, part);
    await_values(before % kStages);
    keep(score, larger, part);
  }

  EPRT_DEVICE void compute() {
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0.f;
    most[0] = most[1] = nothing(), sum[0] = sum[1] = 0.f;
    const int blocks = tile.blocks(), visible = min(blocks, (tile.seen + w * 64) / kKeys);  // to all rows
    add_first(blocks, visible == 0);
    int block = 1;
#pragma unroll 1
    for (; block < visible; ++block) add_block<false>(block, blocks);
#pragma unroll 1
    for (; block < blocks; ++block) add_block<true>(block, blocks);
    used += blocks;
    const uint32_t last = used - 1;
    barrier_wait(&s.v_full[last % kStages], last / kStages & 1);
    multiply_values(last % kStages);
    await_values(last % kStages);
  }

  // Four lanes hold 8 columns of a row, two each. They exchange them, so that each has all 8 of every fourth such
  // group.
  EPRT_DEVICE void store() {
    const int quad = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
      const float mean = 1.f / sum[h];
      uint16_t* to = p.out + int64_t(tile.first_token + row + 8 * h) * p.out_stride + tile.head * 128 + quad * 8;
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
        uint32_t word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          word[k] = pack_bf16(out[4 * (j + k) + 2 * h] * mean, out[4 * (j + k) + 2 * h + 1] * mean);
        exchange(word[0], word[1], quad & 1, 1), exchange(word[2], word[3], quad & 1, 1);
        exchange(word[0], word[2], quad & 2, 2), exchange(word[1], word[3], quad & 2, 2);
        if (row + 8 * h < tile.rows) *reinterpret_cast<Vec16*>(to + 8 * j) = Vec16{word[0], word[1], word[2], word[3]};
      }
    }
  }

  EPRT_DEVICE void run() {
    if (w == 1) end_turn();  // the first turn is warpgroup 0's
    for (uint32_t number = 0;; ++number) {
      barrier_wait(&s.q_full, number & 1);
      tile = of_lane(lane == 0 ? s.tile : Tile{}, 0);  // which is the one that says when it may be overwritten
      if (tile.head < 0) break;
      compute();
      store();
    }
    if (w == 0) begin_turn();
  }
};

EPRT_DEVICE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  bulk_fence_shared();
}

EPRT_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
EPRT_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

__global__ void __launch_bounds__(kThreads, 1) prompt_attention(const __grid_constant__ PromptParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + (1024 - shared_address(smem) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.k_full[i], 1), barrier_init(&s.k_empty[i], kConsumers / kWarp);
      barrier_init(&s.v_full[i], 1), barrier_init(&s.v_empty[i], kConsumers / kWarp);
    }
    barrier_init(&s.q_full, 1), barrier_init(&s.q_empty, kConsumers / kWarp);
    publish_barriers();
  }
  __syncthreads();
  const int group =
      __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);  // the same in all lanes, which the compiler sees
  if (group == 2) {
    give_registers();
    if (threadIdx.x < kConsumers + kWarp) load(p, s);
  } else {
    take_registers();
    Consumer(p, s, group).run();
  }
}

}  // namespace eprt
