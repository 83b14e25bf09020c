// y = x W_e^T for bf16 rows that are grouped by expert, tens to hundreds each: y [R, N] is bf16, sums are fp32.
//
// A tile is 256 rows of W times all rows of an expert up to MOST_ROWS (more rows are cut into equal tiles), so that W
// passes through shared memory once or twice: what such a product waits for is bytes from L2. The two thread blocks of
// a cluster compute neighbouring tiles and load what both need only once, each one half of it, for both: a tile of W
// where an expert has two tiles of rows, else the tile of rows. Of a block, one thread keeps loads STAGES steps ahead,
// and two warpgroups multiply, each a quarter of the tile's rows of W from its first half and a quarter from its second
// half. If gated, the halves are gate and up rows, so that a thread holds the gate and the up value of each of its
// outputs.
//
// The grid is persistent: a cluster takes each num_clusters-th unit, which is two tiles.
//
// Compile-time constants: GATED (W_e is [2N, K], gate rows, then up rows; y = silu(gate) * up), STAGES,
// MOST_ROWS.
#include "grouped_units.cuh"

namespace eprt {

constexpr int kThreads = 384;  // registers are moved by warpgroup, so the loading thread has one

struct Stage {
  uint8_t w[2 * kHalf * kStepBytes];
  uint8_t x[kMostRows * kStepBytes];
};

struct Shared {
  Stage stage[STAGES];
  uint64_t full[STAGES], empty[STAGES];
  Starts starts;
};

// The loading warpgroup's registers go to the multiplying ones. Called by whole warpgroups.
EPRT_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
EPRT_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

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
  while (units.take(p, s.starts, rank)) {
    const int matrix = p.matrix ? p.matrix[units.expert] : units.expert;
    const int w_row = matrix * (GATED ? 2 : 1) * p.n + units.tile * kColumns;
    for (int step = 0; step < p.steps; ++step) {
      barrier_wait(s.empty + slot, parity);
      loads.load(s.stage[slot], s.full + slot, units, step * kStepBytes, w_row);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }
  }
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
  store_sums<kRows>(p, unit, group * 64 + warp * 16, first, second);
}

EPRT_DEVICE void multiply_units(const GroupedProductParams& p, Shared& s, int rank) {
  Units unit;
  int slot = 0;
  uint32_t parity = 0;
  while (unit.take(p, s.starts, rank)) {
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
  if (threadIdx.x < kWarp) find_units(p, s.starts, threadIdx.x);
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
