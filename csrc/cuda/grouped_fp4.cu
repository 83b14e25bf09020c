// As grouped_product.cu, for matrices in fp4 (e2m1, an e8m0 scale for each 32 columns of a row), which become bf16
// without rounding on their way to the tensor cores, once for each tile.
//
// Of a block, one thread loads W, four bits a value, into a ring of its own, which is given back as soon as it was
// read; another one loads x. A warpgroup widens W into a second ring, and two warpgroups multiply it, as in
// grouped_product.cu. So widening, loads and products of different steps run side by side, and with few rows what is
// waited for is W from memory.
//
// What is written into the bits of a bf16 is the value times 2^-126: sign, and two bits of exponent and one of mantissa
// where those of bf16 begin; 0 and 0.5 are subnormal in both formats. One multiplication takes the scale and 2^94; sums
// are multiplied by the rest, 2^32 (GPU_FP4_SCALES in ops/weight.py: for which scales no bit is lost).
//
// Compile-time constants: those of grouped_units.cuh.
#include "grouped_units.cuh"

namespace eprt {

constexpr int kThreads = 512;  // two multiplying warpgroups, a loading and a widening one
constexpr int kWideners = 128, kFirstWidener = kThreads - kWideners;
constexpr int kRowBytes = kStep / 2;  // of fp4, in a step
constexpr int kScaleSteps = 4;        // whose scales a thread loads at once: 8 of each of its rows
constexpr int kWeightSlots = 5, kRowSlots = 4, kWideSlots = 3;
constexpr float kRest = 4294967296.f;

struct Shared {
  uint8_t wide[kWideSlots][2 * kHalf * kStepBytes];
  uint8_t x[kRowSlots][kMostRows * kStepBytes];
  uint8_t w[kWeightSlots][2 * kHalf * kRowBytes];
  uint64_t w_full[kWeightSlots], w_empty[kWeightSlots];
  uint64_t x_full[kRowSlots], x_empty[kRowSlots];
  uint64_t wide_full[kWideSlots], wide_empty[kWideSlots];
  Starts starts;
};

// A place in a ring.
template <int kSlots>
struct Slot {
  uint32_t parity;  // of the phase to wait for
  int index = 0;

  EPRT_DEVICE void advance() {
    if (++index == kSlots) index = 0, parity ^= 1;
  }
};
constexpr uint32_t kFilled = 0, kFree = 1;  // a phase before the first one counts as ended

// Called by whole warpgroups: registers go to those that need them.
EPRT_DEVICE void registers_for_loads() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
EPRT_DEVICE void registers_for_widening() { asm volatile("setmaxnreg.dec.sync.aligned.u32 72;"); }
EPRT_DEVICE void registers_for_products() { asm volatile("setmaxnreg.inc.sync.aligned.u32 200;"); }

// First row of W in this block's tile, in its first half; the second half begins second_half() later.
EPRT_DEVICE int first_row(const GroupedProductParams& p, const Units& unit) {
  const int matrix = p.matrix ? p.matrix[unit.expert] : unit.expert;
  return matrix * (GATED ? 2 : 1) * p.n + unit.tile * kColumns;
}
EPRT_DEVICE int second_half(const GroupedProductParams& p) { return GATED ? p.n : kHalf; }

// Called by one thread.
EPRT_DEVICE void load_weights(const GroupedProductParams& p, Shared& s, int rank) {
  const uint64_t policy = keep_as_it_is();
  Units unit;
  Slot<kWeightSlots> slot{kFree};
  while (unit.take(p, s.starts, rank)) {
    const int row = first_row(p, unit), second = row + second_half(p);
    for (int step = 0; step < p.steps; ++step, slot.advance()) {
      uint8_t* to = s.w[slot.index];
      uint64_t* full = s.w_full + slot.index;
      barrier_wait(s.w_empty + slot.index, slot.parity);
      barrier_expect(full, sizeof(s.w[0]));
      if (unit.shares_w) {
        load_box_for_both(to + rank * kHalf * kRowBytes, &p.w, step * kRowBytes, rank ? second : row, full, policy);
      } else {
        load_box(to, &p.w, step * kRowBytes, row, full, policy);
        load_box(to + kHalf * kRowBytes, &p.w, step * kRowBytes, second, full, policy);
      }
    }
  }
}

// Called by one thread.
EPRT_DEVICE void load_rows(const GroupedProductParams& p, Shared& s, int rank) {
  const uint64_t policy = keep_longest();
  Units unit;
  Slot<kRowSlots> slot{kFree};
  while (unit.take(p, s.starts, rank)) {
    for (int step = 0; step < p.steps; ++step, slot.advance()) {
      uint64_t* full = s.x_full + slot.index;
      barrier_wait(s.x_empty + slot.index, slot.parity);
      barrier_expect(full, unit.boxes * kBox * kStepBytes);
      for (int box = unit.shares_w ? 0 : rank; box < unit.boxes; box += unit.shares_w ? 1 : 2) {
        uint8_t* to = s.x[slot.index] + box * kBox * kStepBytes;
        const int row = unit.row + box * kBox;
        if (unit.shares_w)
          load_box(to, &p.x, step * kStepBytes, row, full, policy);
        else
          load_box_for_both(to, &p.x, step * kStepBytes, row, full, policy);
      }
    }
  }
}

EPRT_DEVICE uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

// Eight values, in order. factor: twice the same bf16.
EPRT_DEVICE Vec16 widened(uint32_t word, uint32_t factor) {
  const uint32_t odd = word >> 4;
  Vec16 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // byte i: a value in the lowest bits of either half, then sign and magnitude moved
    const uint32_t pair = __byte_perm(word, odd, i | (4 + i) << 8) & 0x000f000fu;
    out.w[i] = multiply_pairs(pair * (1u << 12 | 1u << 6) & 0x81c081c0u, factor);
  }
  return out;
}

// What the scales of 32 columns make of their values: 2^94 of them, as two bf16.
EPRT_DEVICE uint32_t factor_of(uint32_t scale) { return (scale + 94) * (0x10001u << 7); }

// Scales of the steps from a multiple of kScaleSteps on, of a widening thread's row in either half.
struct Scales {
  uint64_t half[2];

  // Beyond N the last row stands in.
  EPRT_DEVICE void load(const GroupedProductParams& p, const Units& unit, int step) {
    const int within = unit.tile * kColumns + int(threadIdx.x) - kFirstWidener, groups = p.steps * kStep / 32;
    const int matrix_row = first_row(p, unit) - unit.tile * kColumns;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = GATED ? min(within, p.n - 1) + i * p.n : min(within + i * kHalf, p.n - 1);
      half[i] = *reinterpret_cast<const uint64_t*>(p.scale + int64_t(matrix_row + row) * groups + step * kStep / 32);
    }
  }
};

struct Widener {
  Shared& s;
  Slot<kWeightSlots> from{kFilled};
  Slot<kWideSlots> to{kFree};
  Vec16 four_bits[2][2];  // of the thread's row in either half

  EPRT_DEVICE void fetch() {
    const int row = threadIdx.x - kFirstWidener, lane = threadIdx.x % kWarp;
    barrier_wait(s.w_full + from.index, from.parity);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      four_bits[i / 2][i % 2] =
          *reinterpret_cast<const Vec16*>(s.w[from.index] + (i / 2 * kHalf + row) * kRowBytes + i % 2 * 16);
    __syncwarp();
    if (lane < 2) arrive_at(lane, s.w_empty + from.index);
    from.advance();
  }

  // Widens what was fetched while what comes next is fetched. scale: two bytes of each of the thread's rows.
  EPRT_DEVICE void widen_step(uint32_t first_scale, uint32_t second_scale, bool fetches) {
    const Vec16 now[2][2] = {{four_bits[0][0], four_bits[0][1]}, {four_bits[1][0], four_bits[1][1]}};
    const int row = threadIdx.x - kFirstWidener, lane = threadIdx.x % kWarp;
    if (fetches) fetch();
    barrier_wait(s.wide_empty + to.index, to.parity);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint8_t* out = s.wide[to.index] + (half * kHalf + row) * kStepBytes;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t factor = factor_of((half ? second_scale : first_scale) >> i / 4 * 8 & 0xff);
        *reinterpret_cast<Vec16*>(out + (i ^ row % 8) * 16) = widened(now[half][i / 4].w[i % 4], factor);
      }
    }
    bulk_fence_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(s.wide_full + to.index);
    to.advance();
  }
};

// Scales are loaded kScaleSteps ahead, also of the next unit.
EPRT_DEVICE void widen_units(const GroupedProductParams& p, Shared& s, int rank) {
  Widener widener{s};
  Units unit;
  Scales next;
  bool any = unit.take(p, s.starts, rank);
  if (any) next.load(p, unit, 0), widener.fetch();
  while (any) {
    Units following = unit;
    const bool more = following.take(p, s.starts, rank);
    for (int step = 0; step < p.steps; step += kScaleSteps) {
      const Scales now = next;
      const bool goes_on = step + kScaleSteps < p.steps;
      if (goes_on)
        next.load(p, unit, step + kScaleSteps);
      else if (more)
        next.load(p, following, 0);
#pragma unroll
      for (int i = 0; i < kScaleSteps; ++i)
        widener.widen_step(uint32_t(now.half[0] >> 16 * i), uint32_t(now.half[1] >> 16 * i),
                           i + 1 < kScaleSteps || goes_on || more);
    }
    unit = following, any = more;
  }
}

struct Multiplier {
  const GroupedProductParams& p;
  Shared& s;
  Slot<kRowSlots> x{kFilled};
  Slot<kWideSlots> w{kFilled};

  EPRT_DEVICE void give_back(int x_slot, int w_slot) {
    const int lane = threadIdx.x % kWarp;
    if (lane < 2) arrive_at(lane, s.x_empty + x_slot);
    if (lane == 0) barrier_arrive(s.wide_empty + w_slot);
  }

  // A warpgroup's part of a tile, of which kRows rows are computed.
  template <int kRows>
  EPRT_DEVICE void multiply_unit(const Units& unit) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / kWarp % 4;
    float first[kRows / 2] = {}, second[kRows / 2] = {};
    int last_x = -1, last_w = 0;
    for (int step = 0; step < p.steps; ++step) {
      barrier_wait(s.x_full + x.index, x.parity);
      barrier_wait(s.wide_full + w.index, w.parity);
      const uint64_t rows = operand(s.x[x.index]), wide = operand(s.wide[w.index] + group * 64 * kStepBytes);
      constexpr uint64_t kToSecond = kHalf * kStepBytes / 16;
      multiply_fence();
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) {
        multiply_bf16<kRows>(first, wide + 2 * k, rows + 2 * k);
        multiply_bf16<kRows>(second, wide + kToSecond + 2 * k, rows + 2 * k);
      }
      multiply_commit();
      multiply_wait_all_but<1>();
      if (last_x >= 0) give_back(last_x, last_w);
      last_x = x.index, last_w = w.index;
      x.advance(), w.advance();
    }
    multiply_wait();
    give_back(last_x, last_w);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) first[i] *= kRest, second[i] *= kRest;
    store_sums<kRows>(p, unit, group * 64 + warp * 16, first, second);
  }

  EPRT_DEVICE void multiply(const Units& unit) {
    switch (unit.boxes) {
#define CASE(boxes)                    \
  case boxes:                          \
    multiply_unit<boxes * kBox>(unit); \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
#undef CASE
    }
  }
};

EPRT_DEVICE void multiply_units(const GroupedProductParams& p, Shared& s, int rank) {
  Multiplier multiplier{p, s};
  Units unit;
  while (unit.take(p, s.starts, rank)) multiplier.multiply(unit);
}

// Called by one thread. Slots that the other block's copies fill, too, are given back by both blocks.
EPRT_DEVICE void begin_rings(Shared& s) {
  constexpr int kWidenWarps = kWideners / kWarp, kMultiplyWarps = kConsumers / kWarp;
  for (int i = 0; i < kWeightSlots; ++i) barrier_init(s.w_full + i, 1), barrier_init(s.w_empty + i, 2 * kWidenWarps);
  for (int i = 0; i < kRowSlots; ++i) barrier_init(s.x_full + i, 1), barrier_init(s.x_empty + i, 2 * kMultiplyWarps);
  for (int i = 0; i < kWideSlots; ++i)
    barrier_init(s.wide_full + i, kWidenWarps), barrier_init(s.wide_empty + i, kMultiplyWarps);
  publish_barriers();
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_fp4(const __grid_constant__ GroupedProductParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + (1024 - shared_address(smem) % 1024) % 1024);
  const int rank = cluster_rank();
  if (threadIdx.x < kWarp) find_units(p, s.starts, threadIdx.x);
  if (threadIdx.x == kConsumers) begin_rings(s);
  sync_cluster();
  if (threadIdx.x >= kFirstWidener) {
    registers_for_widening();
    widen_units(p, s, rank);
  } else if (threadIdx.x >= kConsumers) {
    registers_for_loads();
    if (threadIdx.x == kConsumers) load_weights(p, s, rank);
    if (threadIdx.x == kConsumers + kWarp) load_rows(p, s, rank);
  } else {
    registers_for_products();
    multiply_units(p, s, rank);
  }
  sync_cluster();  // a block's barriers must last until the other block has arrived at them
}

}  // namespace eprt
