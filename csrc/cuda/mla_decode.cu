// Attention of few queries per request over a paged cache of latents, absorbed form, bfloat16: every head reads the
// same entries, 576 values for the scores, of which the first 512 are the value too.
//
// A thread block has kRows rows (token, head) of one request and walks through its context in blocks of 64 positions,
// which lie in two buffers. Two warpgroups take turns: each computes the scores and weights of every other block. Each
// adds both its own and the other's blocks to its half of the output's columns, so the output fits into registers. The
// own weights come from registers, the other's through shared memory: they lie in the tile of the block's rotated keys,
// which nobody needs once the scores are known. While one warpgroup computes weights, the other's products run.
//
// The largest score so far passes from block to block, so both warpgroups scale alike. It changes only when it grows by
// more than a factor of 2^kSlack, which is rare after the first blocks, so the output is rarely rescaled.
//
// The thread blocks of a cluster have different rows of the same request: each loads half of the tiles, and the
// hardware hands them to both.
//
// Compile-time constants: CTAS (thread blocks of a cluster, 1 or 2), GATHER (mla_gather.cuh).
#include "mla_load.cuh"
#include "softmax.cuh"
#include "wgmma_bf16.cuh"

namespace eprt {

// Barriers of the thread block. kWeighed + w: warpgroup w has stored a block's weights, which the other one awaits.
constexpr int kOfWarpgroup = 1, kAllConsumers = 3, kWeighed = 4;
constexpr uint64_t kTileStep = kTileBytes / 16, kColumnStep = 2, kRowStep = 128;  // in descriptors

// What a thread of warpgroup w holds: columns 256 w .. 256 w + 255 of two rows, as products leave them.
template <int w>
struct Consumer {
  const MlaDecodeParams& p;
  Shared& s;
  int rank, lane, warp;
  int row;  // of the thread block's, the thread's first; the other is 8 below
  float out[128];
  float most[2], sum[2];                  // of the two rows: log2 scale, sum of the own blocks' weights
  uint32_t weights[16];                   // of the own block
  uint32_t used_own = 0, used_other = 0;  // how often each buffer was used before this segment
  int visible[2], all_visible;            // positions that each row sees, that every row of the thread block sees

  EPRT_DEVICE Consumer(const MlaDecodeParams& p, Shared& s, int rank)
      : p(p), s(s), rank(rank), lane(threadIdx.x % kWarp), warp(threadIdx.x / kWarp % 4) {
    row = warp * 16 + lane / 4;
  }

  // This warp reads the half of the buffer no more, and of the other warpgroup's buffer the weights neither.
  EPRT_DEVICE void release(int buffer) {
    if (lane < kSharers) barrier_arrive_at(&s.empty[buffer][w], kSharers > 1 ? lane : rank);
  }

  // Lowers the sums of the rows to new scales. kDrain: products that do not change them may run.
  template <bool kDrain = false>
  EPRT_DEVICE void rescale(float first, float second) {
    const float low = fade(most[0], first), high = fade(most[1], second);
    most[0] = first, most[1] = second;
    if (!__any_sync(kAllLanes, low != 1.f || high != 1.f)) return;
    if (kDrain) multiply_wait();  // the compiler would wait anyway, and in every case
    sum[0] *= low, sum[1] *= high;
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
      out[i] *= low, out[i + 1] *= low;
      out[i + 2] *= high, out[i + 3] *= high;
    }
  }

  // Sets the own half of a block's positions from the context's end on to zero: a weight of 0 does not undo a NaN.
  EPRT_DEVICE void clear_rest(int buffer, int known) {
    if (kGather || known >= kKeys) return;  // gathered rows behind the end are zeros
    for (int i = threadIdx.x % kWarpgroup; i < kHalf * (kKeys - known) * 8; i += kWarpgroup) {
      const int chunk = i % 8, at = i / 8 % (kKeys - known) + known, tile = i / 8 / (kKeys - known);
      *reinterpret_cast<Vec16*>(s.kv[buffer][w * kHalf + tile] + at * 128 + chunk * 16) = Vec16{};
    }
    bulk_fence_shared();
    barrier_sync(kOfWarpgroup + w, kWarpgroup);
  }

  // The scores of the block in the own buffer.
  EPRT_DEVICE void multiply_keys(float (&score)[32], uint32_t parity) {
    const uint64_t q = operand(s.q), k = operand(s.kv[w]);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int tile = i < kHalf ? w * kHalf + i : i < 2 * kHalf ? (1 - w) * kHalf + i - kHalf : kRope;
      if (tile % 2 == 0) barrier_wait(&s.full[w][tile / 2], parity), fence_gathered();
      multiply_fence();
#pragma unroll
      for (int k16 = 0; k16 < 4; ++k16)
        multiply_bf16(score, q + tile * kTileStep + k16 * kColumnStep, k + tile * kTileStep + k16 * kColumnStep,
                      i + k16 > 0);
    }
    multiply_commit();
  }

  // The log2 scales of a block's weights: those so far, but of rows with a score far above. Stores new ones.
  EPRT_DEVICE void find_scale(const float (&score)[32], float scale, float (&larger)[2]) {
    float x[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[h] = fmaxf(score[2 * h], score[2 * h + 1]);
#pragma unroll
      for (int j = 1; j < 8; ++j) x[h] = fmaxf(x[h], fmaxf(score[4 * j + 2 * h], score[4 * j + 2 * h + 1]));
      x[h] *= scale, larger[h] = most[h];
    }
    // Not ">=": a row without a scale asks for one. A vote is cheaper than the exchange between a row's lanes: products
    // leave hardly any of shared memory's bandwidth, which exchanges use, too.
    if (!__any_sync(kAllLanes, !(x[0] < most[0] + kSlack && x[1] < most[1] + kSlack))) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[h] = fmaxf(x[h], __shfl_xor_sync(kAllLanes, x[h], 1));
      x[h] = fmaxf(x[h], __shfl_xor_sync(kAllLanes, x[h], 2));
      if (x[h] > most[h] + kSlack) larger[h] = x[h];
    }
    if (lane % 4 == 0) s.most[warp * 8 + lane / 4] = {larger[0], larger[1]};
  }

  // Scores become weights; stores them for the other warpgroup. first: position of the block.
  EPRT_DEVICE void weigh(float (&score)[32], int first, float (&larger)[2], float (&part)[2]) {
    const float scale = p.scale * kLog2e;
    if (first + kKeys > all_visible) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int position = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (position >= visible[i / 2 % 2]) score[i] = nothing();
      }
    }
    find_scale(score, scale, larger);
    part[0] = part[1] = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float base = larger[h] == nothing() ? 0.f : larger[h];
        const float a = exp2_fast(score[4 * j + 2 * h] * scale - base);
        const float b = exp2_fast(score[4 * j + 2 * h + 1] * scale - base);
        part[h] += a + b;
        weights[2 * j + h] = pack_bf16(a, b);
      }
    store_weights();
  }

  EPRT_DEVICE void store_weights() {
    uint8_t* to = s.kv[w][kRope] + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = (2 * i + lane / 16) ^ (lane % 8);
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to + chunk * 16)),
          "r"(weights[4 * i]), "r"(weights[4 * i + 1]), "r"(weights[4 * i + 2]), "r"(weights[4 * i + 3])
          : "memory");
    }
    bulk_fence_shared();
    barrier_arrive(kWeighed + w, kConsumers);
  }

  // Waits for the weights of the other warpgroup's next block, and takes over their scale.
  template <bool kDrain>
  EPRT_DEVICE void await_other() {
    barrier_sync(kWeighed + 1 - w, kConsumers);
    const Pair now = s.most[warp * 8 + lane / 4];
    rescale<kDrain>(now.first, now.second);
  }

  // Starts the products of block i of the segment, after await_other.
  EPRT_DEVICE void add_other(int i, int first) {
    constexpr int buffer = 1 - w;
    const uint32_t parity = (used_other + i / 2) & 1;
    barrier_wait(&s.full[buffer][2 * w], parity);
    barrier_wait(&s.full[buffer][2 * w + 1], parity);
    fence_gathered();
    clear_rest(buffer, all_known - first);
    const uint64_t values = transposed_operand(s.kv[buffer][w * kHalf], kTileBytes);
    const uint64_t x = operand(s.kv[buffer][kRope]);
    hold(out);
    multiply_fence();
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) add_product(out, x + k16 * kColumnStep, values + k16 * kRowStep);
    multiply_commit();
  }

  // The same of a block whose weights this warpgroup computed; waits for the end.
  EPRT_DEVICE void add_own(int first) {
    clear_rest(w, all_known - first);
    const uint64_t values = transposed_operand(s.kv[w][w * kHalf], kTileBytes);
    hold(out);
    multiply_fence();
#pragma unroll
    for (int k16 = 0; k16 < 4; ++k16) add_product(out, weights + 4 * k16, values + k16 * kRowStep);
    multiply_commit();
    finish(w);
#pragma unroll
    for (int k = 0; k < 16; ++k) asm volatile("" ::"r"(weights[k]));  // were read by the products until now
  }

  EPRT_DEVICE void finish(int buffer) {
    multiply_wait();
    hold(out);
    release(buffer);
  }

  // Two blocks of a segment, the first of which begins at position `first`; kHasBoth: if not, there is only the first.
  // Products of the two warpgroups follow each other in this order: scores of the first block (warpgroup 0), of the
  // second (1); values of the first (0 and 1), of the second (1 and 0). So each has weights to compute while the
  // products of the other run, and buffers become free one after the other.
  template <bool kHasBoth>
  EPRT_DEVICE void add_two(int i, int first, bool last_scores) {
    float score[32], larger[2], part[2];
    if constexpr (w == 0) {
      multiply_keys(score, (used_own + i / 2) & 1);
      multiply_wait();
      hold(score);
      if (last_scores && lane == 0) barrier_arrive(&s.q_empty);
      weigh(score, first, larger, part);
      rescale(larger[0], larger[1]);
      sum[0] += part[0], sum[1] += part[1];
      add_own(first);
      if constexpr (!kHasBoth) return;
      await_other<false>();
      add_other(i + 1, first + kKeys);
      finish(1);
    } else {
      if constexpr (kHasBoth) multiply_keys(score, (used_own + i / 2) & 1);
      await_other<kHasBoth>();
      add_other(i, first);
      if constexpr (!kHasBoth) return finish(0);
      multiply_wait_all_but<1>();
      hold(score);
      if (last_scores && lane == 0) barrier_arrive(&s.q_empty);
      weigh(score, first + kKeys, larger, part);
      finish(0);
      rescale(larger[0], larger[1]);
      sum[0] += part[0], sum[1] += part[1];
      add_own(first + kKeys);
    }
  }

  int all_known;  // positions of the request

  EPRT_DEVICE void begin(const Segment& segment) {
    const Request& request = segment.request;
    const int first_row = segment.group * kGroupRows + rank * kRows, behind = request.length - request.tokens + 1;
    all_known = request.length;
    all_visible = behind + first_row / p.all.heads;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      visible[h] = min(request.length, behind + (first_row + row + 8 * h) / p.all.heads);
      most[h] = nothing(), sum[h] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] = 0.f;
  }

  EPRT_DEVICE void compute(const Segment& segment, uint32_t segments) {
    const int count = segment.end - segment.begin;
    barrier_wait(&s.q_full, segments & 1);
    if (w >= count && lane == 0) barrier_arrive(&s.q_empty);
    const int first = segment.begin * kKeys;
#pragma unroll 1
    for (int i = 0; i + 1 < count; i += 2) add_two<true>(i, first + i * kKeys, i + w + 2 >= count);
    if (count % 2) add_two<false>(count - 1, first + (count - 1) * kKeys, true);
    used_own += (count + 1 - w) / 2, used_other += (count + w) / 2;
  }

  // The sums of the weights of all blocks.
  EPRT_DEVICE void share_sums(uint32_t segments) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
      sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
      if (lane % 4 == 0) s.sum[segments & 1][w][row + 8 * h] = sum[h];
    }
    barrier_sync(kAllConsumers, kConsumers);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = s.sum[segments & 1][0][row + 8 * h] + s.sum[segments & 1][1][row + 8 * h];
  }

  // Two lanes hold 4 columns of a row, two each, and exchange them, so that each has all 4 of every other such group.
  EPRT_DEVICE void store_partial(const Segment& segment, int share) {
    const int slot = partial_slot(share, segment.begin == 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = int64_t(slot) * kGroupRows + rank * kRows + row + 8 * h;
      const float mean = sum[h] > 0.f ? 1.f / sum[h] : 0.f;
      if (w == 0 && lane % 4 == 0) p.log_sum[at] = sum[h] > 0.f ? most[h] + __log2f(sum[h]) : nothing();
      float* to = p.partial + at * kLatent + w * 256 + lane % 2 * 8 + lane % 4 / 2 * 4;
#pragma unroll
      for (int j = 0; j < 32; j += 2) {
        uint32_t word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) word[k] = __float_as_uint(out[4 * (j + k / 2) + 2 * h + k % 2] * mean);
        exchange(word[0], word[2], lane & 1, 1), exchange(word[1], word[3], lane & 1, 1);
        *reinterpret_cast<Vec16*>(to + 8 * j) = Vec16{word[0], word[1], word[2], word[3]};
      }
    }
  }

  // Four lanes hold 8 columns of a row, two each. They exchange them, so that each has all 8 of every fourth such
  // group.
  EPRT_DEVICE void store(const Segment& segment) {
    const int first_row = segment.group * kGroupRows + rank * kRows + row, quad = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = first_row + 8 * h;
      const float mean = sum[h] > 0.f ? 1.f / sum[h] : 0.f;
      const int64_t out_row = int64_t(segment.request.first_token) * p.all.heads + at;
      uint16_t* to = p.out + out_row * kLatent + w * 256 + quad * 8;
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        uint32_t word[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          word[k] = pack_bf16(out[4 * (j + k) + 2 * h] * mean, out[4 * (j + k) + 2 * h + 1] * mean);
        exchange(word[0], word[1], quad & 1, 1), exchange(word[2], word[3], quad & 1, 1);
        exchange(word[0], word[2], quad & 2, 2), exchange(word[1], word[3], quad & 2, 2);
        if (at < segment.request.tokens * p.all.heads)
          *reinterpret_cast<Vec16*>(to + 8 * j) = Vec16{word[0], word[1], word[2], word[3]};
      }
    }
  }

  EPRT_DEVICE void run(int share) {
    uint32_t segments = 0;
    Walk walk(p.all, p.bound, share);
    Segment segment;
    while (walk.next(segment)) {
      begin(segment);
      if (segment.end > segment.begin) {
        compute(segment, segments);
        share_sums(segments);
        ++segments;
      }
      if (segment.whole())
        store(segment);
      else
        store_partial(segment, share);
    }
  }
};

__global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(kThreads, 1)
    mla_decode(const __grid_constant__ MlaDecodeParams p) {
  extern __shared__ uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
  const int rank = kCtas > 1 ? cluster_rank() : 0, share = blockIdx.x / kCtas;
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) {
      for (int group = 0; group < kGroups; ++group) barrier_init(&s.full[buffer][group], kLoaders);
      for (int w = 0; w < 2; ++w) barrier_init(&s.empty[buffer][w], 4 * kSharers);
    }
    barrier_init(&s.q_full, 1), barrier_init(&s.q_empty, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    bulk_fence_shared();
  }
  __syncthreads();
  if (kCtas > 1) cluster_barrier();
  await_preceding_kernel();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int group =
      __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);  // the same in all lanes, which the compiler sees
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40));
    if constexpr (kGather) {
      gather(p, s, share, rank);
    } else if (threadIdx.x < kConsumers + kWarp) {
      if (p.box_rows == 64)
        load<1>(p, s, share, rank);
      else if (p.box_rows == 32)
        load<2>(p, s, share, rank);
      else
        load<4>(p, s, share, rank);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(232));
    if (group == 0)
      Consumer<0>(p, s, rank).run(share);
    else
      Consumer<1>(p, s, rank).run(share);
  }
  __syncwarp();
  if (kCtas > 1) cluster_barrier();  // the other block still arrives at this one's barriers
}

}  // namespace eprt
