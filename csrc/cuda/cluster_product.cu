// y [rows, N] = x [rows, K] W[N, K]^T for at most TOKENS rows, e4m3 with fp32 scales per row and 128 columns of x and
// per 128 x 128 of W; y is bf16. Made for few rows: the time is that of reading W.
//
// A cluster of SPLITS thread blocks computes one tile of 64 * WARPGROUPS * BLOCKS rows of W, each block a share of K.
// The blocks add up their parts through distributed shared memory, in order, so no part goes through L2 and a second
// kernel. Within a block one warp keeps loads STAGES steps ahead and the others multiply; a step is 128 columns, one
// scale.
//
// Several matrices [N, K], behind each other in memory, may each have columns of x of their own, side by side: the
// tiles of all of them are one launch.
//
// Compile-time constants: TOKENS (16, 32, 64 or 128), WARPGROUPS, BLOCKS (1 or 2; 2 only where a tile is a multiple of
// 128 rows), SPLITS (at most 8), STAGES.
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace eprt {

constexpr int kTile = 64 * WARPGROUPS * BLOCKS;  // rows of W
constexpr int kStep = 128;                       // columns, which are bytes
constexpr int kConsumers = 128 * WARPGROUPS;     // threads
// Whether consumers need more registers than an equal share: then they get those of the loading warps, of which there
// are four, because registers are moved by warpgroup.
constexpr bool kUnequal = TOKENS == 128 && WARPGROUPS * BLOCKS > 2;
constexpr int kThreads = kConsumers + (kUnequal ? 128 : kWarp);
constexpr int kConsumersOnly = 1;      // barrier
constexpr int kSumStride = kTile + 4;  // avoids bank conflicts of a warp's stores
static_assert(BLOCKS == 1 || kTile % kScaleGroup == 0, "a warpgroup's rows share a scale");

struct ClusterProductParams {
  TensorMap w;           // boxes of kTile rows, 128 columns
  TensorMap x;           // boxes of TOKENS rows, 128 columns
  const float* w_scale;  // [ceil(N / 128), K / 128]
  const float* x_scale;  // [K / 128, scale_rows], of all matrices' columns
  uint16_t* y;           // bf16 [rows, N]
  int32_t rows;
  int32_t scale_rows;  // a multiple of 4, at most TOKENS
  int32_t n;           // N of all matrices, a multiple of 4
  int32_t matrix_n;    // N of one, a multiple of kTile if there are several
  int32_t steps;       // K / 128
};

struct Stage {
  uint8_t w[kTile * kStep];
  uint8_t x[TOKENS * kStep];
};

struct Shared {
  union {
    Stage stage[STAGES];
    float sum[TOKENS][kSumStride];  // after the last step
  };
  float x_scale[STAGES][TOKENS];
  uint64_t full[STAGES], empty[STAGES];
};

// This block's steps [begin, end).
struct Share {
  int tile, rank, begin, end;

  EPRT_DEVICE explicit Share(int steps) : tile(blockIdx.x / SPLITS), rank(blockIdx.x % SPLITS) {
    begin = rank * steps / SPLITS, end = (rank + 1) * steps / SPLITS;
  }
};

// Called by one thread. The preceding kernel never writes W, so the first loads of W do not wait for its end.
EPRT_DEVICE void load_steps(const ClusterProductParams& p, Shared& s, const Share& share) {
  const int count = share.end - share.begin, ahead = min(count, STAGES);
  const int matrix = share.tile * kTile / p.matrix_n;
  const auto load_w = [&](int i) {
    const int slot = i % STAGES;
    barrier_expect(s.full + slot, sizeof(Stage) + p.scale_rows * 4);
    load_box(s.stage[slot].w, &p.w, (share.begin + i) * kStep, share.tile * kTile, s.full + slot);
  };
  const auto load_x = [&](int i) {
    const int slot = i % STAGES, step = matrix * p.steps + share.begin + i;
    load_box(s.stage[slot].x, &p.x, step * kStep, 0, s.full + slot);
    bulk_load(s.x_scale[slot], p.x_scale + int64_t(step) * p.scale_rows, p.scale_rows * 4, s.full + slot);
  };
  for (int i = 0; i < ahead; ++i) load_w(i);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = 0; i < ahead; ++i) load_x(i);
  for (int i = ahead; i < count; ++i) {
    barrier_wait(s.empty + i % STAGES, (i / STAGES - 1) & 1);
    load_w(i);
    load_x(i);
  }
}

// A warpgroup multiplies its rows of the tile.
EPRT_DEVICE void multiply_steps(const ClusterProductParams& p, Shared& s, const Share& share,
                                float (&sum)[BLOCKS][TOKENS / 2]) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % kWarp;
  const int first_row = share.tile * kTile + group * 64 * BLOCKS;
  const float* w_scale = p.w_scale + int64_t(min(first_row, p.n - 1) / kScaleGroup) * p.steps;
  float next_scale = share.begin < share.end ? __ldg(w_scale + share.begin) : 0.f;
  for (int step = share.begin; step < share.end; ++step) {
    const int i = step - share.begin, slot = i % STAGES;
    const float scale = next_scale;
    next_scale = __ldg(w_scale + min(step + 1, share.end - 1));
    barrier_wait(s.full + slot, (i / STAGES) & 1);
    const uint64_t x = operand(s.stage[slot].x);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const uint64_t w = operand(s.stage[slot].w + (group * BLOCKS + block) * 64 * kStep);
      float part[TOKENS / 2];
      multiply_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply<TOKENS>(part, w + 2 * k, x + 2 * k, k > 0);
      multiply_commit();
      multiply_wait();
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
        const float2 x_scale = *reinterpret_cast<const float2*>(s.x_scale[slot] + 8 * j + 2 * (lane % 4));
        const float low = scale * x_scale.x, high = scale * x_scale.y;
        sum[block][4 * j] += part[4 * j] * low, sum[block][4 * j + 1] += part[4 * j + 1] * high;
        sum[block][4 * j + 2] += part[4 * j + 2] * low, sum[block][4 * j + 3] += part[4 * j + 3] * high;
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(s.empty + slot);
  }
}

// Stores the warpgroup's sums in the block's part, which overlays the stages.
EPRT_DEVICE void keep_part(Shared& s, const float (&sum)[BLOCKS][TOKENS / 2]) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    const int row = (group * BLOCKS + block) * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j)
#pragma unroll
      for (int at = 0; at < 4; ++at) s.sum[8 * j + 2 * (lane % 4) + at % 2][row + at / 2 * 8] = sum[block][4 * j + at];
  }
}

// Waits until all consumers of the cluster have stored their parts. (Threads that have exited are not waited for.)
EPRT_DEVICE void await_parts() {
  if (SPLITS > 1)
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
  else
    barrier_sync(kConsumersOnly, kConsumers);
}

// Waits until all consumers of the cluster have read the parts: a block's shared memory vanishes when it ends. No data
// is handed over, so no fence is needed.
EPRT_DEVICE void await_readers() {
  if (SPLITS > 1) asm volatile("barrier.cluster.arrive.relaxed;\n barrier.cluster.wait;" ::: "memory");
}

EPRT_DEVICE float4 load_from(int rank, const float* mine) {
  float4 v;
  asm volatile(
      "{ .reg .b32 at; mapa.shared::cluster.u32 at, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [at]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(shared_address(mine)), "r"(rank)
      : "memory");
  return v;
}

// Stores the sum of all blocks' parts in y, for every SPLITS-th token.
EPRT_DEVICE void store_sums(const ClusterProductParams& p, const Shared& s, const Share& share) {
  constexpr int kQuads = kTile / 4;
  for (int i = threadIdx.x;; i += kConsumers) {
    const int token = share.rank + i / kQuads * SPLITS, column = i % kQuads * 4;
    if (token >= p.rows) return;
    const int n = share.tile * kTile + column;
    if (n >= p.n) continue;
    float4 part[SPLITS], sum = {};
#pragma unroll
    for (int rank = 0; rank < SPLITS; ++rank) part[rank] = load_from(rank, &s.sum[token][column]);
#pragma unroll
    for (int rank = 0; rank < SPLITS; ++rank)
      sum.x += part[rank].x, sum.y += part[rank].y, sum.z += part[rank].z, sum.w += part[rank].w;
    *reinterpret_cast<uint2*>(p.y + int64_t(token) * p.n + n) = {pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w)};
  }
}

__global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(kThreads, 1)
    cluster_product(const __grid_constant__ ClusterProductParams p) {
  extern __shared__ uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
  const Share share(p.steps);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(s.full + i, 1), barrier_init(s.empty + i, kConsumers / kWarp);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    bulk_fence_shared();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if constexpr (kUnequal) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 2 ? 24 : 32));
    if (threadIdx.x == kConsumers) load_steps(p, s, share);
  } else {
    if constexpr (kUnequal) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WARPGROUPS == 2 ? 240 : 160));
    float sum[BLOCKS][TOKENS / 2] = {};
    multiply_steps(p, s, share, sum);
    barrier_sync(kConsumersOnly, kConsumers);
    keep_part(s, sum);
    await_parts();
    store_sums(p, s, share);
    await_readers();
  }
}

}  // namespace eprt
