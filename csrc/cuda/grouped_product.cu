// y = x W_e^T for bf16 rows that are grouped by expert, tens to hundreds each: y [R, N] is bf16, sums are fp32.
//
// A tile is 256 rows of W times all rows of an expert up to 176 (more rows are cut into equal tiles), so that W
// passes through shared memory once or twice: what such a product waits for is bytes from L2. The two thread blocks of
// a cluster compute neighbouring tiles and load what both need only once, each one half of it, for both: a tile of W
// where an expert has two tiles of rows, else the tile of rows. Of a block, one thread keeps loads STAGES steps ahead,
// and two warpgroups multiply, each a quarter of the tile's rows of W from its first half and a quarter from its second
// half. If gated, the halves are gate and up rows, so that a thread holds the gate and the up value of each of its
// outputs.
//
// The grid is persistent: a cluster takes each num_clusters-th unit, which is two tiles.
//
// Compile-time constants: GATED (W_e is [2N, K], gate rows, then up rows; y = silu(gate) * up), STAGES.
#include "cluster.cuh"
#include "tensor_map.cuh"
#include "wgmma_bf16.cuh"

namespace eprt {

constexpr int kHalf = 128;       // rows of W in half a tile
constexpr int kStep = 64;        // columns
constexpr int kStepBytes = 128;  // of a row
constexpr int kBox = 16;         // rows of x that one load brings
constexpr int kMostRows = 176;   // of x in a tile
constexpr int kConsumers = 256;  // threads
constexpr int kThreads = 384;    // registers are moved by warpgroup, so the loading thread has one
constexpr int kMostExperts = 1024;
constexpr int kColumns = GATED ? kHalf : 2 * kHalf;  // of y in a tile

struct GroupedProductParams {
  TensorMap w;            // all matrices, boxes of kHalf rows and kStep columns
  TensorMap x;            // boxes of kBox rows and kStep columns
  const int32_t* count;   // [num_experts]: rows of each
  const int32_t* matrix;  // [num_experts]: index of each one's matrix; null: its own index
  uint16_t* y;            // bf16 [R, N]
  int32_t num_experts;    // at most kMostExperts
  int32_t n;              // N, a multiple of 4
  int32_t steps;          // K / kStep, rounded up
  float limit;            // GATED: gate is cut to at most this, up to -limit..limit; infinite: neither is
};

struct Stage {
  uint8_t w[2 * kHalf * kStepBytes];
  uint8_t x[kMostRows * kStepBytes];
};

struct Shared {
  Stage stage[STAGES];
  uint64_t full[STAGES], empty[STAGES];
  int32_t begin[kMostExperts + 1];  // first row of each expert; of no expert: the number of all rows
  int32_t unit[kMostExperts + 1];   // first unit of each expert; of no expert: the number of all units
};

// Tiles of rows of an expert.
EPRT_DEVICE int row_tiles(int rows) { return (rows + kMostRows - 1) / kMostRows; }

EPRT_DEVICE int tiles_of_n(int n) { return (n + kColumns - 1) / kColumns; }

// Units of an expert with so many tiles of rows: two of these by each tile of W, then the last of an odd number of them
// by each two tiles of W.
EPRT_DEVICE int units_of(int tiles, int tiles_of_w) {
  return tiles / 2 * tiles_of_w + tiles % 2 * ((tiles_of_w + 1) / 2);
}

// Called by one warp: fills begin and unit.
EPRT_DEVICE void find_units(const GroupedProductParams& p, Shared& s, int lane) {
  int rows_before = 0, units_before = 0;
  for (int first = 0; first < p.num_experts; first += kWarp) {
    const int expert = first + lane, count = expert < p.num_experts ? p.count[expert] : 0;
    const int units = units_of(row_tiles(count), tiles_of_n(p.n));
    int rows_sum = count, units_sum = units;
    for (int by = 1; by < kWarp; by *= 2) {
      const int rows_left = __shfl_up_sync(kAllLanes, rows_sum, by);
      const int units_left = __shfl_up_sync(kAllLanes, units_sum, by);
      if (lane >= by) rows_sum += rows_left, units_sum += units_left;
    }
    if (expert < p.num_experts) {
      s.begin[expert] = rows_before + rows_sum - count;
      s.unit[expert] = units_before + units_sum - units;
    }
    rows_before += __shfl_sync(kAllLanes, rows_sum, kWarp - 1);
    units_before += __shfl_sync(kAllLanes, units_sum, kWarp - 1);
  }
  if (lane == 0) s.begin[p.num_experts] = rows_before, s.unit[p.num_experts] = units_before;
}

// The units of this cluster, one after the other.
struct Units {
  int next = blockIdx.x / 2, expert = 0;
  int tile = 0;           // of W: this block's
  int row = 0;            // first row of the tile in x and y
  int rows = 0;           // of the tile
  int boxes = 0;          // of x that hold them
  bool shares_w = false;  // whether both blocks compute this tile of W; else both compute this tile of rows

  EPRT_DEVICE bool take(const GroupedProductParams& p, const Shared& s, int rank) {
    if (next >= s.unit[p.num_experts]) return false;
    while (next >= s.unit[expert + 1]) ++expert;
    const int count = s.begin[expert + 1] - s.begin[expert], tiles = row_tiles(count);
    boxes = ((count + tiles - 1) / tiles + kBox - 1) / kBox;
    const int within = next - s.unit[expert], tiles_of_w = tiles_of_n(p.n), of_pairs = tiles / 2 * tiles_of_w;
    shares_w = within < of_pairs;
    const int row_tile = shares_w ? within / tiles_of_w * 2 + rank : tiles - 1;
    tile = shares_w ? within % tiles_of_w : (within - of_pairs) * 2 + rank;
    const int first = row_tile * boxes * kBox;
    row = s.begin[expert] + first, rows = min(boxes * kBox, count - first);
    next += gridDim.x / 2;
    return true;
  }
};

// How long L2 keeps lines. Many clusters read the same rows of x, while W, read once or twice, passes by.
EPRT_DEVICE uint64_t keep_longest() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  return policy;
}
EPRT_DEVICE uint64_t keep_as_it_is() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_unchanged.b64 %0;" : "=l"(policy));
  return policy;
}

EPRT_DEVICE void load_box(void* to, const TensorMap* map, int column, int row, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// To the same place in both blocks, whose barriers count it.
EPRT_DEVICE void load_box_for_both(void* to, const TensorMap* map, int column, int row, uint64_t* barrier,
                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(uint16_t(3)), "l"(policy)
      : "memory");
}

// Not with a release at the cluster's scope, which would wait for all of the warp's memory operations, some 0.7 us in
// every step: what the arriving warp gives back was read by tensor cores, and it has waited for these.
EPRT_DEVICE void arrive_at(int rank, uint64_t* barrier) {
  asm volatile(
      "{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [at]; }" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

EPRT_DEVICE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  bulk_fence_shared();
}

// The loading warpgroup's registers go to the multiplying ones. Called by whole warpgroups.
EPRT_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
EPRT_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

EPRT_DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}

// One step of a unit into a slot.
struct Loads {
  const GroupedProductParams& p;
  int rank;
  uint64_t w_policy = keep_as_it_is(), x_policy = keep_longest();

  EPRT_DEVICE void load(Stage& stage, uint64_t* full, const Units& unit, int column, int w_row) const {
    const int second_row = w_row + (GATED ? p.n : kHalf);
    barrier_expect(full, sizeof(stage.w) + unit.boxes * kBox * kStepBytes);
    if (unit.shares_w) {
      load_box_for_both(stage.w + rank * kHalf * kStepBytes, &p.w, column, rank ? second_row : w_row, full, w_policy);
      for (int box = 0; box < unit.boxes; ++box)
        load_box(stage.x + box * kBox * kStepBytes, &p.x, column, unit.row + box * kBox, full, x_policy);
    } else {
      load_box(stage.w, &p.w, column, w_row, full, w_policy);
      load_box(stage.w + kHalf * kStepBytes, &p.w, column, second_row, full, w_policy);
      for (int box = rank; box < unit.boxes; box += 2)
        load_box_for_both(stage.x + box * kBox * kStepBytes, &p.x, column, unit.row + box * kBox, full, x_policy);
    }
  }
};

// Called by one thread.
EPRT_DEVICE void load_units(const GroupedProductParams& p, Shared& s, int rank) {
  const Loads loads{p, rank};
  Units units;
  int slot = 0;
  uint32_t parity = 1;  // a phase before the first one counts as ended
  while (units.take(p, s, rank)) {
    const int matrix = p.matrix ? p.matrix[units.expert] : units.expert;
    const int w_row = matrix * (GATED ? 2 : 1) * p.n + units.tile * kColumns;
    for (int step = 0; step < p.steps; ++step) {
      barrier_wait(s.empty + slot, parity);
      loads.load(s.stage[slot], s.full + slot, units, step * kStepBytes, w_row);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
  }
}

// The 8 x 8 matrix of which lane l holds row l / 4, columns 2 (l % 4) and the next, becomes its transpose, held alike.
EPRT_DEVICE uint32_t transposed(uint32_t pair) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// Stores sums of 16 columns of y, from `column` on, for the tile's rows. Called by whole warps.
template <int kRows>
EPRT_DEVICE void store_columns(const GroupedProductParams& p, const Units& unit, int column,
                               const float (&sum)[kRows / 2]) {
  const int lane = threadIdx.x % kWarp, quarter = lane % 4;
  // Of two lanes, the even one keeps the first 8 columns and gets the other one's; then each lane has 4 in a row.
  const bool odd = quarter % 2;
  const int mine = column + (odd ? 8 + 2 * (quarter - 1) : 2 * quarter);
  uint16_t* to = p.y + int64_t(unit.row + lane / 4) * p.n + mine;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const uint32_t low = transposed(pack_bf16(sum[4 * j], sum[4 * j + 1]));
    const uint32_t high = transposed(pack_bf16(sum[4 * j + 2], sum[4 * j + 3]));
    const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
    if (mine < p.n && 8 * j + lane / 4 < unit.rows)
      *reinterpret_cast<uint2*>(to + int64_t(8 * j) * p.n) = odd ? uint2{other, high} : uint2{low, other};
  }
}

EPRT_DEVICE float silu(float x) {
  float y;
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(1.f + __expf(-x)));
  return y;
}

// The comparisons leave NaN as it is.
EPRT_DEVICE float silu_times(float gate, float up, float limit) {
  up = up > limit ? limit : up < -limit ? -limit : up;
  return silu(gate > limit ? limit : gate) * up;
}

// A warpgroup's part of a tile, of which kRows rows are computed.
template <int kRows>
EPRT_DEVICE void multiply_unit(const GroupedProductParams& p, Shared& s, const Units& unit, int& slot,
                               uint32_t& parity) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp;
  float first[kRows / 2] = {}, second[kRows / 2] = {};
  int last = -1;
  for (int step = 0; step < p.steps; ++step) {
    barrier_wait(s.full + slot, parity);
    const uint64_t x = operand(s.stage[slot].x), w = operand(s.stage[slot].w + group * 64 * kStepBytes);
    constexpr uint64_t kToSecond = kHalf * kStepBytes / 16;
    multiply_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
      multiply_bf16<kRows>(first, w + 2 * k, x + 2 * k);
      multiply_bf16<kRows>(second, w + kToSecond + 2 * k, x + 2 * k);
    }
    multiply_commit();
    multiply_wait_all_but<1>();
    if (last >= 0 && lane < 2) arrive_at(lane, s.empty + last);
    last = slot;
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
  multiply_wait();
  if (lane < 2) arrive_at(lane, s.empty + last);
  const int column = unit.tile * kColumns + group * 64 + warp * 16;
  if constexpr (GATED) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) first[i] = silu_times(first[i], second[i], p.limit);
    store_columns<kRows>(p, unit, column, first);
  } else {
    store_columns<kRows>(p, unit, column, first);
    store_columns<kRows>(p, unit, column + kHalf, second);
  }
}

EPRT_DEVICE void multiply_units(const GroupedProductParams& p, Shared& s, int rank) {
  Units unit;
  int slot = 0;
  uint32_t parity = 0;
  while (unit.take(p, s, rank)) {
    switch (unit.boxes) {
#define CASE(boxes)                                        \
  case boxes:                                              \
    multiply_unit<boxes * kBox>(p, s, unit, slot, parity); \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
#undef CASE
    }
  }
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_product(const __grid_constant__ GroupedProductParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + (1024 - shared_address(smem) % 1024) % 1024);
  const int rank = cluster_rank();
  if (threadIdx.x < kWarp) find_units(p, s, threadIdx.x);
  if (threadIdx.x == kConsumers) {
    for (int i = 0; i < STAGES; ++i) barrier_init(s.full + i, 1), barrier_init(s.empty + i, 2 * kConsumers / kWarp);
    publish_barriers();
  }
  sync_cluster();
  if (threadIdx.x >= kConsumers) {
    give_registers();
    if (threadIdx.x == kConsumers) load_units(p, s, rank);
  } else {
    take_registers();
    multiply_units(p, s, rank);
  }
  sync_cluster();  // a block's barriers must last until the other block has arrived at them
}

}  // namespace eprt
