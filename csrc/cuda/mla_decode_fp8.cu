// Attention to chosen tokens, of few queries per request, over a paged cache of latents in e4m3, absorbed form: both
// products with them are products of e4m3 on the tensor cores. mla_dense_fp8.cu is for whole contexts.
//
// As in mla_decode.cu a thread block has kRows rows (token, head) of one request and walks through its context in
// blocks of 64 positions, which lie in kStages stages. Two warpgroups take turns: each computes the scores and weights
// of every other block, and adds the values of all blocks to its half of the output's columns. In front of the weights
// of its own block it starts the products of the other's block, which run meanwhile; a third one copies entries.
//
// Scores. A query's latents are divided by a scale and rounded to e4m3 (mla_quantize.cu), its rotated part is divided
// by the same scale, as both parts of an entry are by the entry's: a score is query scale * entry scale * (product of
// the latents + product of the rotated parts), and both products add up in the same registers.
//
// Values. Weights are multiplied by the entries' scales and rounded to e4m3; the sum that the output is divided by is
// that of the weights before. 8-bit products want positions side by side in both operands, but entries lie one below
// the other. So the output is computed transposed, values^T x weights^T: its left operand may come from registers, and
// it is transposed on the way there. Weights are stored in the order of positions that this leaves.
//
// A row's weights are scaled such that the largest is about 2^kTop and e4m3 holds what is up to 2^-14 of it. The scale
// passes from block to block and changes only when a score is larger by more than a factor of 2^kRise.
//
// The thread blocks of a cluster have different rows of the same request, and copy the same entries at about the same
// time.
//
// Compile-time constants: CTAS (blocks of a cluster) and TERMS (of queries' latents), 1 or 2; GATHER, 1
// (mla_gather.cuh).
#include "mla_fp8_load.cuh"
#include "mla_fp8_rows.cuh"
#include "wgmma_fp8.cuh"

namespace eprt {

// Barriers of the thread block. kWeighed + w: warpgroup w has stored a block's weights, which the other one awaits.
constexpr int kOfWarpgroup = 1, kAllConsumers = 3, kWeighed = 4;

// Values of 32 positions on their way to products: 16 columns each.
using Values = uint32_t[4][4];

// Products read these registers until here.
EPRT_DEVICE void keep(const Values& x) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" ::"r"(x[i / 4][i % 4]));
}

// Warpgroup w. A warp has the columns of the output from first_column(w, warp) on.
template <int w>
struct Consumer : ScoreRows, OutputColumns {
  const MlaDecodeFp8Params& p;
  Shared& s;
  int rank, lane, warp;
  Turn stage;                            // of the first block that was not added yet
  int own_buffer = 0, other_buffer = 0;  // of the weights of the next own block, and of the other's

  EPRT_DEVICE Consumer(const MlaDecodeFp8Params& p, Shared& s, int rank)
      : p(p), s(s), rank(rank), lane(threadIdx.x % kWarp), warp(threadIdx.x / kWarp % 4) {
    row = warp * 16 + lane / 4;
  }

  EPRT_DEVICE const Segment& segment() const { return s.walk[w].segment; }

  // This warp reads the stage no more.
  EPRT_DEVICE void release(const Turn& of) {
    __syncwarp();
    if (lane < kSharers) barrier_arrive_at(&s.empty[of.index], kSharers > 1 ? lane : rank);
  }

  EPRT_DEVICE int first_row() const { return segment().group * kGroupRows + rank * kRows; }

  // ---- scores and weights of an own block

  // Sets the block's scales from the context's end on to zero: a weight of 0 does not undo a NaN.
  EPRT_DEVICE void clear_scales(const Turn& at, int first) {
    if (first + kKeys <= known) return;
    const int i = threadIdx.x % kWarpgroup;
    if (i < kKeys && first + i >= known) *reinterpret_cast<float*>(s.stage[at.index].scale + i * kScaleBytes) = 0.f;
    barrier_sync(kOfWarpgroup + w, kWarpgroup);
  }

  // Raises the rows' scales where scores ask for it, and says so to all who add values. largest: of the lane's entries.
  EPRT_DEVICE void raise(const float (&score)[32], float log_largest) {
    float top[2];
    find_top(top, score, log_largest);
    float faded[2] = {1.f, 1.f};
    raise_scales(faded, top, s.most);
    tell_faded(faded, s.fades[w][warp], s.fade[w]);
  }

  // Scores become weights, which are stored.
  EPRT_DEVICE void weigh(float (&score)[32], const Turn& at, int first) {
    clear_scales(at, first);
    // Of this lane's positions, 8 j + 2 (lane % 4) + e; read twice, since registers are scarce.
    const uint8_t* scales = s.stage[at.index].scale + lane % 4 * 2 * kScaleBytes;
    const auto scale_of = [&](int j, int e) {
      return *reinterpret_cast<const float*>(scales + (8 * j + e) * kScaleBytes);
    };
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float scale = scale_of(i / 2, i % 2);
      largest = fmaxf(largest, scale);
      score[i / 2 * 4 + i % 2] *= scale, score[i / 2 * 4 + 2 + i % 2] *= scale;
    }
    mask(score, segment().request, p.all.heads, first_row(), first);
    raise(score, __log2f(largest));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float base = most[h] == nothing() ? 0.f : most[h] - kTop;
      uint8_t* to = s.weights[own_buffer] + (row + 8 * h) * 128 + lane % 4 * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 16 positions
        float y[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int j = 2 * i + k / 2;
          const float weight = exp2_fast(score[4 * j + 2 * h + k % 2] * factor[h] - base);
          sum[h] += weight, y[k] = weight * scale_of(j, k % 2);
        }
        *reinterpret_cast<uint32_t*>(to + (w * 4 + i ^ lane / 4) * 16) = pack_fp8(y[0], y[1], y[2], y[3]);
      }
    }
  }

  // ---- values of any block

  // The own columns of half of a block's positions. left: positions of the request from the block's first on; those
  // behind become zero, since a weight of 0 does not undo a NaN.
  EPRT_DEVICE void load_values(Values& x, const Turn& at, int half, int left) {
    const uint8_t* tile = s.stage[at.index].latent[2 * w + warp / 2] + (half * 32 + lane) * 128;
#pragma unroll
    for (int m = 0; m < 4; ++m) load_transposed(x[m], tile + ((warp % 2 * 4 + m) ^ lane % 8) * 16);
    if (left >= kKeys) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 16 positions, of which a word has four: see arrange_pairs
      uint32_t kept = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (32 * half + 16 * i + 8 * (k / 2) + 2 * (lane % 4) + k % 2 < left) kept |= 0xffu << 8 * k;
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k / 2][i * 2 + k % 2] &= kept;
    }
  }

  // Starts the products of half of a block with its weights.
  EPRT_DEVICE void multiply_values(const Values& x, int owner, int buffer, int half) {
    const uint64_t weights = operand(s.weights[buffer]) + owner * kHalfRow + half * kColumnStep;
    hold_all();
    multiply_fence();
#pragma unroll
    for (int m = 0; m < 4; ++m) add_product_fp8(out[m], x[m], weights);
    multiply_commit();
  }

  // Waits for all products, which read x.
  EPRT_DEVICE void finish_values(const Values& x) {
    multiply_wait();
    hold_all();
    keep(x);
  }

  // Waits for the weights of the other warpgroup's next block, and takes over their scale.
  EPRT_DEVICE void await_other() {
    barrier_sync(kWeighed + 1 - w, kConsumers);
    take_scales(s.most);
    rescale(s.fades[1 - w], s.fade[1 - w]);
  }

  // Starts the products of the first half of the other's block, once its weights are there.
  EPRT_DEVICE void begin_other(Values& x, const Turn& at, int left) {
    barrier_wait(&s.full[at.index], at.parity);
    load_values(x, at, 0, left);
    await_other();
    multiply_values(x, 1 - w, other_buffer, 0);
  }

  // The rest, after begin_other. A stage is released when products have begun: their operands have come.
  EPRT_DEVICE void end_other(Values& first, const Turn& at, int left) {
    Values x;
    load_values(x, at, 1, left);
    finish_values(first);
    multiply_values(x, 1 - w, other_buffer, 1);
    release(at);
    other_buffer ^= 1;
    finish_values(x);
  }

  // The block whose weights were stored last.
  EPRT_DEVICE void add_own(const Turn& at, int left) {
    Values x, y;
    load_values(x, at, 0, left);
    load_values(y, at, 1, left);
    rescale(s.fades[w], s.fade[w]);
    multiply_values(x, w, own_buffer, 0);
    multiply_values(y, w, own_buffer, 1);
    release(at);
    own_buffer ^= 1;
    finish_values(x);
    keep(y);
  }

  // An own block and, if there is one, the other's block in front of it. first: position of the own block.
  template <bool kOther>
  EPRT_DEVICE void add_block(int first, bool last) {
    float score[32];
    Values x;
    const Turn other = stage;
    if (kOther) stage.advance();
    const Turn own = stage;
    stage.advance();
    barrier_wait(&s.full[own.index], own.parity), fence_gathered();
    multiply_keys(score, s.q, s.stage[own.index]);
    if constexpr (kOther) {
      begin_other(x, other, kKeys);
      multiply_wait_all_but<1>();
    } else {
      multiply_wait();
    }
    hold(score);
    if (last && lane == 0) barrier_arrive(&s.q_empty);
    weigh(score, own, first);
    bulk_fence_shared();
    barrier_arrive(kWeighed + w, kConsumers);
    if constexpr (kOther) end_other(x, other, kKeys);
    barrier_sync(kOfWarpgroup + w, kWarpgroup);
    add_own(own, known - first);
  }

  EPRT_DEVICE void add_blocks() {
    const int begin = uniform(segment().begin), count = uniform(segment().end) - begin;
    int first = begin * kKeys, i = 2 - w;
    if (w >= count && lane == 0) barrier_arrive(&s.q_empty);
    if constexpr (w == 0) add_block<false>(first, count <= 2);
    first += i * kKeys;
#pragma unroll 1
    for (; i < count; i += 2, first += 2 * kKeys) add_block<true>(first, i + 2 >= count);
    if (i > count) return;
    const Turn other = stage;
    stage.advance();
    Values x;
    begin_other(x, other, known - first + kKeys);
    end_other(x, other, known - first + kKeys);
  }

  // Of the weights of all blocks: by the parity of segments, so that the next one's come beside.
  EPRT_DEVICE void share_sums(int parity) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = sum_of_quad(sum[h]);
      if (lane % 4 == 0) s.sum[parity][w][row + 8 * h] = sum[h];
    }
    barrier_sync(kAllConsumers, kConsumers);
  }

  EPRT_DEVICE void store_log_sum(int share, int parity) {
    const int64_t slot = partial_slot(share, segment().begin == 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = row + 8 * h;
      const float all = segment().end > segment().begin ? s.sum[parity][0][at] + s.sum[parity][1][at] : 0.f;
      if (lane % 4 == 0)
        p.log_sum[slot * kGroupRows + rank * kRows + at] = all > 0.f ? most[h] - kTop + __log2f(all) : nothing();
    }
  }

  // The next segment of the share, in shared memory: registers are for the output.
  EPRT_DEVICE bool next(int share, bool first) {
    barrier_sync(kOfWarpgroup + w, kWarpgroup);  // nobody reads the last one any more
    if (threadIdx.x % kWarpgroup == 0) {
      Walk walk(p.all, p.bound, share);
      if (!first) walk.at = s.walk[w].at;
      s.walk[w].more = walk.next(s.walk[w].segment);
      s.walk[w].at = walk.at;
    }
    barrier_sync(kOfWarpgroup + w, kWarpgroup);
    return uniform(s.walk[w].more);
  }

  EPRT_DEVICE void run(int share) {
    const int column = first_column(w, warp);
    uint32_t segments = 0;
    for (bool first = true; next(share, first); first = false) {
      const int parity = segments & 1;
      begin_rows(p, segment().request, first_row());
      clear();
      if (uniform(segment().end > segment().begin)) {
        barrier_wait(&s.q_full, parity);
        add_blocks();
        share_sums(parity);
        divide(s.sum[parity]);
        ++segments;
      }
      if (segment().whole()) {
        store(output_at(p, segment().request, first_row()) + column,
              segment().request.tokens * p.all.heads - first_row());
      } else {
        store_partial(partial_at(p, share, segment(), rank) + column);
        if (w == 0) store_log_sum(share, parity);
      }
    }
  }
};

// Registers of a warpgroup's threads. All warpgroups begin with 168.
EPRT_DEVICE void registers_for_loads() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
EPRT_DEVICE void registers_for_products() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

__global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(kThreads, 1)
    mla_decode_fp8(const __grid_constant__ MlaDecodeFp8Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + (1024 - shared_address(smem) % 1024) % 1024);
  const int rank = kCtas > 1 ? cluster_rank() : 0, share = blockIdx.x / kCtas;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(&s.full[i], kLoaders), barrier_init(&s.empty[i], kReaders * kSharers);
    barrier_init(&s.q_full, 1), barrier_init(&s.q_empty, 8);
    publish_barriers();
  }
  __syncthreads();
  if (kCtas > 1) cluster_barrier();
  await_preceding_kernel();
  start_following_kernel();
  const int group = uniform(threadIdx.x / kWarpgroup);
  if (group == 2) {
    registers_for_loads();
    gather(p, s, share, rank);
  } else {
    registers_for_products();
    if (group == 0)
      Consumer<0>(p, s, rank).run(share);
    else
      Consumer<1>(p, s, rank).run(share);
  }
  __syncwarp();
  if (kCtas > 1) cluster_barrier();  // the other block still arrives at this one's barriers
}

}  // namespace eprt
