// Attention of few queries per request over a paged cache of latents, absorbed form, the latents in e4m3: both products
// with them are products of e4m3 on the tensor cores.
//
// As in mla_decode.cu a thread block has kRows rows (token, head) of one request and walks through its context in
// blocks of 64 positions. One warpgroup computes scores and weights; two others add the blocks' values, each to its
// half of the output's columns; a warp loads. The warpgroups wait for each other at barriers only, so while scores
// become weights the tensor cores add values.
//
// Scores. A query's latents are divided by a scale and rounded to e4m3 (mla_quantize.cu), its rotated part is divided
// by the same scale: a score is query scale * (entry scale * product of the latents + product of the rotated parts).
//
// Values. Weights are multiplied by the entries' scales and rounded to e4m3; the sum that the output is divided by is
// that of the weights before. 8-bit products want positions side by side in both operands, but entries lie one below
// the other. So the output is computed transposed, values^T x weights^T: its left operand may come from registers, and
// it is transposed on the way there. Weights are stored in the order of positions that this leaves.
//
// A row's weights are scaled such that the largest is about 2^kTop and e4m3 holds what is up to 2^-14 of it. The scale
// changes only when a score is larger by more than a factor of 2^kRise.
//
// The thread blocks of a cluster have different rows of the same request: each loads half of the tiles, and the
// hardware hands them to both.
//
// Compile-time constants: CTAS (thread blocks of a cluster, 1 or 2), TERMS (of the queries' latents, 1 or 2).
#include "mla_fp8_load.cuh"
#include "softmax.cuh"
#include "wgmma_bf16.cuh"
#include "wgmma_fp8.cuh"

namespace eprt {

constexpr float kTop = 5.f, kRise = 3.5f;                                       // log2; their sum is below that of 448
constexpr uint64_t kTileStep = kTileBytes / 16, kColumnStep = 2, kHalfRow = 4;  // in descriptors

EPRT_DEVICE float largest_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

EPRT_DEVICE float sum_of_quad(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// This warp reads the stage no more.
EPRT_DEVICE void release(uint64_t* empty, int lane) {
  __syncwarp();
  if (lane < kCtas) barrier_arrive_at(empty, lane);
}

// The warpgroup that computes weights. A thread has two rows, as products leave them.
struct Weigher {
  const MlaDecodeFp8Params& p;
  Shared& s;
  int rank, lane, warp;
  int row;                             // of the thread block's, the thread's first; the other is 8 below
  float most[2], sum[2], factor[2];    // of the two rows: log2 scale, sum of weights, of scores
  int known, visible[2], all_visible;  // positions of the request, that each row sees, that every row sees
  Turn<kStages> stage;
  Turn<2> buffer;

  EPRT_DEVICE Weigher(const MlaDecodeFp8Params& p, Shared& s, int rank)
      : p(p), s(s), rank(rank), lane(threadIdx.x % kWarp), warp(threadIdx.x / kWarp % 4) {
    row = warp * 16 + lane / 4;
  }

  EPRT_DEVICE void begin(const Segment& segment) {
    const Request& request = segment.request;
    const int first_row = segment.group * kGroupRows + rank * kRows, behind = request.length - request.tokens + 1;
    known = request.length;
    all_visible = behind + first_row / p.all.heads;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int mine = first_row + row + 8 * h, q_row = request.first_token * p.all.heads + mine;
      visible[h] = min(request.length, behind + mine / p.all.heads);
      factor[h] = (q_row < p.q_rows ? __ldg(p.q_scale + q_row) : 0.f) * p.softmax_scale * kLog2e;
      most[h] = nothing(), sum[h] = 0.f;
    }
  }

  // Starts the products of the rotated parts and of the latents of the stage's block.
  EPRT_DEVICE void multiply_keys(float (&rope)[32], float (&latent)[32]) {
    const Stage& keys = s.stage[stage.index];
    const uint64_t q = operand(s.q), k = operand(keys.latent), k_rope = operand(keys.rope);
    barrier_wait(&s.full[stage.index], stage.parity);
    multiply_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      multiply_bf16(rope, q + (kQueryTiles - 1) * kTileStep + i * kColumnStep, k_rope + i * kColumnStep, i > 0);
#pragma unroll
    for (int tile = 0; tile < kQueryTiles - 1; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        multiply<64>(latent, q + tile * kTileStep + i * kColumnStep,
                     k + tile % kLatentTiles * kTileStep + i * kColumnStep, tile + i > 0);
    multiply_commit();
  }

  // The scales of this lane's positions: 8 j + 2 (lane % 4) + e in scale[2 j + e]. 0 behind the context.
  EPRT_DEVICE void load_scales(float (&scale)[16], int first) {
    const uint8_t* from = s.stage[stage.index].scale + lane % 4 * 2 * kScaleBytes;
#pragma unroll
    for (int i = 0; i < 16; ++i) scale[i] = *reinterpret_cast<const float*>(from + (i / 2 * 8 + i % 2) * kScaleBytes);
    if (first + kKeys > known) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (first + i / 2 * 8 + lane % 4 * 2 + i % 2 >= known) scale[i] = 0.f;
    }
  }

  EPRT_DEVICE void mask(float (&score)[32], int first) {
    if (first + kKeys <= all_visible) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int position = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (position >= visible[i / 2 % 2]) score[i] = nothing();
    }
  }

  // Raises the rows' scales where scores ask for it, and says so to those who add values.
  EPRT_DEVICE void rescale(const float (&score)[32], float log_scale) {
    bool fades = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(score[2 * h], score[2 * h + 1]);
#pragma unroll
      for (int j = 1; j < 8; ++j) x = fmaxf(x, fmaxf(score[4 * j + 2 * h], score[4 * j + 2 * h + 1]));
      x = largest_of_quad(x) * factor[h] + log_scale;
      const float before = most[h];
      if (x > before + kRise) most[h] = x;
      const float faded = fade(before, most[h]);
      sum[h] *= faded, fades |= faded != 1.f;
      if (lane % 4 == 0) s.fade[buffer.index][row + 8 * h] = faded;
    }
    fades = __any_sync(kAllLanes, fades);
    if (lane == 0) s.fades[buffer.index][warp] = fades;
  }

  // Scores become weights, which are stored.
  EPRT_DEVICE void weigh(float (&score)[32], const float (&scale)[16]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float base = most[h] == nothing() ? 0.f : most[h] - kTop;
      uint8_t* to = s.weights + (row + 8 * h) * 128 + lane % 4 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 16 positions
        float x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int j = 2 * i + k / 2;
          const float weight = exp2_fast(score[4 * j + 2 * h + k % 2] * factor[h] - base);
          sum[h] += weight, x[k] = weight * scale[2 * j + k % 2];
        }
        *reinterpret_cast<uint32_t*>(to + (buffer.index * 4 + i ^ lane / 4) * 16) = pack_fp8(x[0], x[1], x[2], x[3]);
      }
    }
  }

  EPRT_DEVICE void share_means() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = sum_of_quad(sum[h]);
      if (lane % 4 == 0) s.mean[buffer.index][row + 8 * h] = sum[h] > 0.f ? 1.f / sum[h] : 0.f;
    }
  }

  // The block of positions from `first` on. last: of a segment.
  EPRT_DEVICE void add_block(int first, bool last) {
    float score[32], latent[32], scale[16];
    multiply_keys(score, latent);
    load_scales(scale, first);
    float largest = scale[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) largest = fmaxf(largest, scale[i]);
    largest = largest_of_quad(largest);
    multiply_wait();
    hold(score), hold(latent);
    release(&s.empty[stage.index], lane);
    if (last && lane == 0) barrier_arrive(&s.q_empty);
#pragma unroll
    for (int i = 0; i < 32; ++i) score[i] += latent[i] * scale[i / 4 * 2 + i % 2];
    mask(score, first);
    barrier_wait(&s.taken[buffer.index], ~buffer.parity & 1);
    rescale(score, __log2f(largest));
    weigh(score, scale);
    if (last) share_means();
    bulk_fence_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.weighed[buffer.index]);
    stage.advance(), buffer.advance();
  }

  EPRT_DEVICE void store_log_sum(const Segment& segment, int share) {
    const int slot = partial_slot(share, segment.begin == 0);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (lane % 4 == 0)
        p.log_sum[int64_t(slot) * kGroupRows + rank * kRows + row + 8 * h] =
            sum[h] > 0.f ? most[h] - kTop + __log2f(sum[h]) : nothing();
  }

  EPRT_DEVICE void run(int share) {
    uint32_t segments = 0;
    Walk walk(p.all, p.bound, share);
    Segment segment;
    while (walk.next(segment)) {
      begin(segment);
      if (segment.end > segment.begin) barrier_wait(&s.q_full, segments++ & 1);
#pragma unroll 1
      for (int i = segment.begin; i < segment.end; ++i) add_block(i * kKeys, i + 1 == segment.end);
      if (!segment.whole()) store_log_sum(segment, share);
    }
  }
};

// One of the two warpgroups that add values. A thread has columns 256 w + 64 warp + 16 m + 2 (lane / 4) + h of the rows
// 8 j + 2 (lane % 4) + e, in out[m][4 j + 2 h + e].
struct Adder {
  const MlaDecodeFp8Params& p;
  Shared& s;
  int rank, lane, warp, w;
  float out[4][32];
  Turn<kStages> stage;
  Turn<2> buffer;

  EPRT_DEVICE Adder(const MlaDecodeFp8Params& p, Shared& s, int rank)
      : p(p), s(s), rank(rank), lane(threadIdx.x % kWarp), warp(threadIdx.x / kWarp % 4), w(threadIdx.x / kWarpgroup) {}

  // Sets the own half of the stage's positions from `known` on to zero: a weight of 0 does not undo a NaN.
  EPRT_DEVICE void clear_rest(int known) {
    if (known >= kKeys) return;
    for (int i = threadIdx.x % kWarpgroup; i < 2 * (kKeys - known) * 8; i += kWarpgroup) {
      const int chunk = i % 8, at = i / 8 % (kKeys - known) + known, tile = i / 8 / (kKeys - known);
      *reinterpret_cast<Vec16*>(s.stage[stage.index].latent[2 * w + tile] + at * 128 + chunk * 16) = Vec16{};
    }
    bulk_fence_shared();
    barrier_sync(1 + w, kWarpgroup);
  }

  // The 32 positions from 32 k32 on of the own columns.
  EPRT_DEVICE void load_values(uint32_t (&x)[4][4], int k32) {
    const uint8_t* tile = s.stage[stage.index].latent[2 * w + warp / 2] + lane * 128 + k32 * 32 * 128;
#pragma unroll
    for (int m = 0; m < 4; ++m) load_transposed(x[m], tile + ((warp % 2 * 4 + m) ^ lane % 8) * 16);
  }

  EPRT_DEVICE void multiply_values(const uint32_t (&x)[4][4], int k32) {
    const uint64_t weights = operand(s.weights) + buffer.index * kHalfRow + k32 * kColumnStep;
#pragma unroll
    for (int m = 0; m < 4; ++m) hold(out[m]);
    multiply_fence();
#pragma unroll
    for (int m = 0; m < 4; ++m) add_product_fp8(out[m], x[m], weights);
    multiply_commit();
  }

  EPRT_DEVICE void rescale() {
    const int32_t* fades = s.fades[buffer.index];
    if (!(fades[0] | fades[1] | fades[2] | fades[3])) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(&s.fade[buffer.index][8 * j + lane % 4 * 2]);
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) out[m][4 * j + 2 * h] *= by.x, out[m][4 * j + 2 * h + 1] *= by.y;
    }
  }

  // known: positions of the request from the block's first on. last: of a segment, whose weights are read on.
  EPRT_DEVICE void add_block(int known, bool last) {
    uint32_t x[4][4];
    barrier_wait(&s.full[stage.index], stage.parity);
    clear_rest(known);
    load_values(x, 0);
    barrier_wait(&s.weighed[buffer.index], buffer.parity);
    rescale();
    multiply_values(x, 0);
    multiply_wait();
#pragma unroll
    for (int m = 0; m < 4; ++m) hold(out[m]);
    load_values(x, 1);
    multiply_values(x, 1);
    release(&s.empty[stage.index], lane);  // products begin when their operands have come, so the stage was read
    multiply_wait();
#pragma unroll
    for (int m = 0; m < 4; ++m) hold(out[m]);
    stage.advance();
    if (!last) finish_buffer();
  }

  EPRT_DEVICE void finish_buffer() {
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.taken[buffer.index]);
    buffer.advance();
  }

  // Multiplies by 1 / sum of the weights.
  EPRT_DEVICE void divide() {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 by = *reinterpret_cast<const float2*>(&s.mean[buffer.index][8 * j + lane % 4 * 2]);
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) out[m][4 * j + 2 * h] *= by.x, out[m][4 * j + 2 * h + 1] *= by.y;
    }
  }

  EPRT_DEVICE void store_partial(const Segment& segment, int share) {
    const int64_t first = int64_t(partial_slot(share, segment.begin == 0)) * kGroupRows + rank * kRows;
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
  EPRT_DEVICE void store(const Segment& segment) {
    const int first_row = segment.group * kGroupRows + rank * kRows + lane % 4 * 2, group = lane / 4 % 4;
    const int rows = segment.request.tokens * p.all.heads;
    const int64_t out_row = int64_t(segment.request.first_token) * p.all.heads + first_row;
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
        if (first_row + 8 * j + e < rows)
          *reinterpret_cast<Vec16*>(to + (8 * j + e) * kLatent) = Vec16{word[0], word[1], word[2], word[3]};
      }
  }

  // The next segment of the share, in shared memory: registers are for the output.
  EPRT_DEVICE bool next(int share, bool first) {
    barrier_sync(1 + w, kWarpgroup);  // nobody reads the last one any more
    if (threadIdx.x % kWarpgroup == 0) {
      Walk walk(p.all, p.bound, share);
      if (!first) walk.at = s.walk[w].at;
      s.walk[w].more = walk.next(s.walk[w].segment);
      s.walk[w].at = walk.at;
    }
    barrier_sync(1 + w, kWarpgroup);
    return s.walk[w].more;
  }

  EPRT_DEVICE void run(int share) {
    const Segment& segment = s.walk[w].segment;
    for (bool first = true; next(share, first); first = false) {
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int i = 0; i < 32; ++i) out[m][i] = 0.f;
      const int blocks = segment.end - segment.begin;
      int known = segment.request.length - segment.begin * kKeys;
#pragma unroll 1
      for (int left = blocks; left > 0; --left, known -= kKeys) add_block(known, left == 1);
      if (blocks > 0) divide(), finish_buffer();
      if (segment.whole())
        store(segment);
      else
        store_partial(segment, share);
    }
  }
};

EPRT_DEVICE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  bulk_fence_shared();
}

// Registers of a warpgroup's threads. All warpgroups begin with 128.
EPRT_DEVICE void registers_for_loads() { asm volatile("setmaxnreg.dec.sync.aligned.u32 32;"); }
EPRT_DEVICE void registers_for_weights() { asm volatile("setmaxnreg.dec.sync.aligned.u32 112;"); }
EPRT_DEVICE void registers_for_values() { asm volatile("setmaxnreg.inc.sync.aligned.u32 184;"); }

__global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(kThreads, 1)
    mla_decode_fp8(const __grid_constant__ MlaDecodeFp8Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + (1024 - shared_address(smem) % 1024) % 1024);
  const int rank = kCtas > 1 ? cluster_rank() : 0, share = blockIdx.x / kCtas;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], kReaders * kCtas);
    for (int i = 0; i < 2; ++i) barrier_init(&s.weighed[i], 4), barrier_init(&s.taken[i], 8);
    barrier_init(&s.q_full, 1), barrier_init(&s.q_empty, 4);
    publish_barriers();
  }
  __syncthreads();
  if (kCtas > 1) cluster_barrier();
  await_preceding_kernel();
  start_following_kernel();
  const int group =
      __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);  // the same in all lanes, which the compiler sees
  if (group == 3) {
    registers_for_loads();
    if (threadIdx.x < 3 * kWarpgroup + kWarp) {
      if (p.box_rows == 64)
        load<1>(p, s, share, rank);
      else if (p.box_rows == 32)
        load<2>(p, s, share, rank);
      else
        load<4>(p, s, share, rank);
    }
  } else if (group == 2) {
    registers_for_weights();
    Weigher(p, s, rank).run(share);
  } else {
    registers_for_values();
    Adder(p, s, rank).run(share);
  }
  __syncwarp();
  if (kCtas > 1) cluster_barrier();  // the other block still arrives at this one's barriers
}

}  // namespace eprt
