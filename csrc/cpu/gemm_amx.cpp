// AMX: bfloat16 activations times bfloat16, fp8 or int8 weights. Products with a float32 operand use the AVX-512
// kernels.
//
// A tile instruction computes C[16][16] += A[16][step] B[step][16], a step being 64 bytes of a weight row. A is weight
// rows in their layout in memory, so weights need no repacking. B is activations, packed once (gemm_amx_pack.h). The
// sums C are therefore transposed, [column of y][row of y], and so is the packed layout: the SiLU of two neighbouring
// rows of C is one line of the next product's B.
//
// bf16 and fp8 weights: tdpbf16ps adds the products of its even and of its odd elements separately, in order, then both
// to C: in fp32, rounding to nearest even, subnormals as zero. No other row of x takes part, so the order is the same
// for every row. e4m3 values are exact in bf16; a block's scale multiplies the block's fp32 sums. int8 weights:
// activations are quantised to int8 with a scale per row, and sums are integers.
#include <memory>

#include "cpu/gemm_amx_pack.h"
#include "cpu/gemm_amx_tiles.h"
#include "cpu/gemm_bf16x32.h"
#include "cpu/gemm_epilogue.h"

namespace eprt {
namespace {

// Steps of a stripe's stretch of K: for many rows, 32 KB of tiles that stay in L1; for few rows, long runs of memory.
constexpr int kSteps = 16, kLongSteps = 64;
constexpr int kBlockSteps = 4;  // of an fp8 block
constexpr int kBlockUnits = 2;  // 64 elements each, two steps

struct alignas(64) Workspace {
  float sums[2][kMaxColumns][kMaxRows];     // transposed; [1]: up projection. int32 where weights are int8
  float rows[kTileRows][kMaxColumns];       // sums of one row block, not transposed
  float block[2][4][kTileRows][kTileRows];  // C tiles of two fp8 blocks
  float total[kMaxRows / (2 * kTileRows)][4][kTileRows][kTileRows];  // their scaled sums, one tile after another
  char stripe[kLongSteps][2][kTileRows][kStepBytes];                 // A tiles
};

Workspace& workspace() {
  static thread_local const std::unique_ptr<Workspace> space(new Workspace());
  return *space;
}

// What a stored type of weights is in A tiles.
template <class W>
struct TileFormat {
  static constexpr bool kInteger = std::is_same_v<W, int8_t>;
  static constexpr bool kInPlace = !std::is_same_v<W, fp8>;   // A tiles may be the weights in memory
  static constexpr int64_t kUnit = sizeof(W) == 1 ? 64 : 32;  // elements converted together: 64 bytes of bf16 and int8
  static constexpr int kUnitSteps = std::is_same_v<W, fp8> ? 2 : 1;
};

// ---- a piece: transposed sums ---------------------------------------------------------------------------------------

// Computes the product of a piece and weight rows [row0, row0 + n), without the scales of int8, in sums[n][m]. Rows
// from next_row on are likely to be multiplied next, and are prefetched.
template <class W>
class Product {
  using Format = TileFormat<W>;
  static constexpr bool kFp8 = std::is_same_v<W, fp8>;

 public:
  Product(const Piece& piece, int64_t row0, int64_t next_row, float (&sums)[kMaxColumns][kMaxRows])
      : piece_(piece), row0_(row0), next_row_(next_row), sums_(sums), space_(workspace()) {}

  void run() {
    const int64_t clear_bytes = round_up(piece_.m, kTileRows) * sizeof(float);
    const int64_t all_steps = div_up(piece_.w.k, Format::kUnit) * Format::kUnitSteps;
    for (int n = 0; n < piece_.n; n += kStripe) {
      ahead_ = {next_stripe(n), lines_per_step()};
      if constexpr (kFp8) {
        multiply_blocks(n, all_steps);
        continue;
      }
      for (int r = 0; r < kStripe; ++r) std::memset(sums_[n + r], 0, clear_bytes);
      const bool in_place = piece_.m <= 2 * kTileRows && n + kStripe <= piece_.n;
      int64_t step = in_place ? multiply_in_place(n) : 0;
      const int64_t at_once = piece_.m <= 2 * kTileRows ? kLongSteps : kSteps;
      for (; step < all_steps; step += at_once) {
        const int steps = static_cast<int>(min_of(at_once, all_steps - step));
        multiply(n, step, steps, copy_stripe(n, step, steps));
      }
    }
  }

 private:
  // A stripe's memory is fetched evenly while the stripe before it is multiplied, by all pairs of row blocks; of fp8
  // while it is converted.
  int lines_per_step() const { return kFp8 ? 0 : static_cast<int>(div_up(kStripe, div_up(piece_.m, 2 * kTileRows))); }

  // Only one pair of row blocks needs the weights: they are read in place. Multiplies all whole tiles; returns how many
  // steps they are.
  int64_t multiply_in_place(int n) {
    const int64_t row_stride = piece_.w.k * sizeof(W), steps = row_stride / kStepBytes;
    if (steps == 0) return 0;
    const Stripe stripe{reinterpret_cast<const char*>(row(n)), row_stride, kStepBytes, kTileRows * row_stride};
    const RowBlock x0 = block(0), x1 = block(kTileRows);
    shape_tiles(x0.rows, x1.rows);
    load_sums(sums_[n], x1.rows > 0);
    multiply_steps(stripe, x0, x1, 0, static_cast<int>(steps));
    store_sums(sums_[n], x1.rows > 0);
    return steps;
  }

  // Copies a stripe's weights to A tiles; zeros past the piece's rows and past the end of K.
  Stripe copy_stripe(int n, int64_t first_step, int steps) {
    for (int r = 0; r < kStripe; ++r) copy_row(n, r, first_step, steps, space_.stripe);
    return tiles(space_.stripe);
  }

  // The same of one row; fp8 is converted.
  void copy_row(int n, int r, int64_t first_step, int steps, char (*to)[2][kTileRows][kStepBytes]) {
    const int64_t k = first_step / Format::kUnitSteps * Format::kUnit;
    const int64_t depth = min_of<int64_t>(steps / Format::kUnitSteps * Format::kUnit, piece_.w.k - k);
    const W* w = n + r < piece_.n ? row(n + r) + k : nullptr;
    char* out = to[0][r / kTileRows][r % kTileRows];
    for (int64_t i = 0; i < depth; i += Format::kUnit, out += Format::kUnitSteps * sizeof(to[0])) {
      if (w != nullptr && i + Format::kUnit <= depth) {
        store_tile_row(_mm512_loadu_si512(w + i), out);
      } else {
        W padded[Format::kUnit] = {};
        if (w != nullptr) std::memcpy(padded, w + i, (depth - i) * sizeof(W));
        store_tile_row(_mm512_loadu_si512(padded), out);
      }
    }
  }

  static Stripe tiles(const char (*stripe)[2][kTileRows][kStepBytes]) {
    return {stripe[0][0][0], kStepBytes, sizeof(stripe[0]), sizeof(stripe[0][0])};
  }

  // 64 bytes of a weight row as rows of one A tile or two.
  static void store_tile_row(__m512i weights, char* out) {
    if constexpr (kFp8) {
      __m512i first, second;
      widen_fp8x64(weights, first, second);
      _mm512_store_si512(out, first);
      _mm512_store_si512(out + sizeof(Workspace::stripe[0]), second);
    } else {
      _mm512_store_si512(out, weights);
    }
  }

  // Multiplies all rows of the piece by `steps` steps of a stripe, `step` the first of them.
  void multiply(int n, int64_t step, int steps, const Stripe& stripe) {
    for (int m = 0; m < piece_.m; m += 2 * kTileRows) {
      const RowBlock x0 = block(m), x1 = block(m + kTileRows);
      shape_tiles(x0.rows, x1.rows);
      load_sums(&sums_[n][m], x1.rows > 0);
      settle(space_.stripe);
      multiply_steps(stripe, x0, x1, step, steps);
      store_sums(&sums_[n][m], x1.rows > 0);
    }
  }

  // The same for all of K in fp8, one block of it after another. While the first rows are multiplied by a block, the
  // next one is converted: a tile is busy for long, and leaves the rest of the core idle.
  void multiply_blocks(int n, int64_t all_steps) {
    convert_rows(n, 0, kStripe, 0, min_of<int64_t>(all_steps, kBlockSteps));
    std::memset(space_.total, 0, div_up(piece_.m, 2 * kTileRows) * sizeof(space_.total[0]));
    BlockSums last{};
    for (int64_t step = 0; step < all_steps; step += kBlockSteps) {
      const int steps = static_cast<int>(min_of<int64_t>(all_steps - step, kBlockSteps));
      const int next_steps = static_cast<int>(min_of<int64_t>(all_steps - step - steps, kBlockSteps));
      const Stripe stripe = tiles(buffer(step));
      settle(space_.stripe);
      for (int m = 0; m < piece_.m; m += 2 * kTileRows) {
        const RowBlock x0 = block(m), x1 = block(m + kTileRows);
        shape_tiles(x0.rows, x1.rows);
        zero_sums(x1.rows > 0);
        for (int s = 0; s < steps; ++s) {
          multiply_steps({stripe.first + s * stripe.step, stripe.row_stride, stripe.step, stripe.second}, x0, x1,
                         step + s, 1);
          constexpr int kRows = kStripe / kBlockSteps;
          if (m == 0 && next_steps > 0) convert_rows(n, s * kRows, kRows, step + steps, next_steps);
        }
        add_block(n, last);
        last = {step / kBlockSteps, m, x1.rows > 0 ? 4 : 2, space_.block[blocks_++ % 2]};
        store_block(last);
      }
    }
    add_block(n, last);
    store_totals(n);
  }

  // Rows first_row.. of a stripe's block of K, beginning at `step`.
  void convert_rows(int n, int first_row, int count, int64_t step, int64_t steps) {
    for (int r = first_row; r < first_row + count; ++r) {
      ahead_.lines = static_cast<int>(steps / Format::kUnitSteps);
      ahead_.step();
      copy_row(n, r, step, static_cast<int>(steps), buffer(step));
    }
    ahead_.lines = 0;
  }

  // Where the A tiles of the fp8 block are that begins at `step`.
  auto buffer(int64_t step) -> char (*)[2][kTileRows][kStepBytes] {
    return space_.stripe + step / kBlockSteps % 2 * kBlockSteps;
  }

  // What is still to be added to the sums: C tiles of rows m.. and of fp8 block `block` of K.
  struct BlockSums {
    int64_t block;
    int m, tiles;
    float (*values)[kTileRows][kTileRows];
  };

  static void store_block(const BlockSums& to) {
    constexpr int64_t kStride = sizeof(to.values[0][0]);
    _tile_stored(0, to.values[0], kStride);
    _tile_stored(1, to.values[1], kStride);
    if (to.tiles == 2) return;
    _tile_stored(2, to.values[2], kStride);
    _tile_stored(3, to.values[3], kStride);
  }

  // total += scale * the tiles. Those of a block are added while the next one is multiplied.
  void add_block(int n, const BlockSums& from) {
    constexpr float kUnshifted = 1 << kFp8Shift;
    if (from.tiles == 0) return;
    settle(space_.block);
    auto& total = space_.total[from.m / (2 * kTileRows)];
    const int64_t k_blocks = div_up(piece_.w.k, kFp8Block), first = row0_ + n;
    const float* scale = piece_.w.scale + from.block;
    // Weight rows up to the next fp8 block have one scale, those after it another.
    const int same = static_cast<int>(min_of<int64_t>(kStripe, kFp8Block - first % kFp8Block));
    const int rows = min_of(kStripe, piece_.n - n);
    for (int begin = 0; begin < rows; begin = begin == 0 ? same : rows) {
      const Vec factor = set1(kUnshifted * scale[(first + begin) / kFp8Block * k_blocks]);
      for (int t = 0; t < from.tiles; ++t) {
        const int above = t % 2 * kTileRows;  // of this tile's rows in the stripe
        const int end = min_of(begin == 0 ? same : rows, above + kTileRows);
        for (int r = max_of(begin, above); r < end; ++r) {
          float* sum = total[t][r - above];
          store(sum, fma(load(from.values[t][r - above]), factor, load(sum)));
        }
      }
    }
  }

  void store_totals(int n) {
    for (int m = 0; m < piece_.m; m += kTileRows) {
      const auto& total = space_.total[m / (2 * kTileRows)];
      for (int r = 0; r < kStripe; ++r) {
        store(&sums_[n + r][m], load(total[m / kTileRows % 2 * 2 + r / kTileRows][r % kTileRows]));
      }
    }
  }

  void multiply_steps(const Stripe& stripe, const RowBlock& x0, const RowBlock& x1, int64_t step, int steps) {
    x1.rows > 0 ? multiply_tiles<Format::kInteger, true>(stripe, x0, x1, step, steps, ahead_)
                : multiply_tiles<Format::kInteger, false>(stripe, x0, x1, step, steps, ahead_);
  }

  void shape_tiles(int rows0, int rows1) {
    if (rows0 == shape_[0] && rows1 == shape_[1]) return;
    configure(rows0, rows1);
    shape_[0] = rows0, shape_[1] = rows1;
  }

  // What to prefetch while stripe n is multiplied; where no whole stripe follows, the matrix's last.
  const char* next_stripe(int n) const {
    const int64_t next = n + kStripe < piece_.n ? row0_ + n + kStripe : next_row_;
    const int64_t first = next + kStripe <= piece_.w.n ? next : max_of<int64_t>(0, piece_.w.n - kStripe);
    return reinterpret_cast<const char*>(static_cast<const W*>(piece_.w.data) + first * piece_.w.k);
  }

  const W* row(int n) const { return static_cast<const W*>(piece_.w.data) + (row0_ + n) * piece_.w.k; }

  RowBlock block(int m) const {
    return {static_cast<const char*>(piece_.x) + m * piece_.x_stride, max_of(0, min_of(kTileRows, piece_.m - m))};
  }

  const Piece& piece_;
  const int64_t row0_, next_row_;
  FetchAhead ahead_ = {};
  float (&sums_)[kMaxColumns][kMaxRows];
  Workspace& space_;
  int shape_[2] = {-1, -1};
  unsigned blocks_ = 0;  // of fp8, multiplied so far
};

template <class W>
void multiply(const Piece& piece, int64_t row0, int64_t next_row, float (&sums)[kMaxColumns][kMaxRows]) {
  Product<W>(piece, row0, next_row, sums).run();
  _tile_release();
}

// Sums of rows m to m + 15 of a piece in fp32, scaled by what x was quantised with.
template <class W>
class RowBlockSums {
 public:
  RowBlockSums(const Piece& piece, int m) : m_(m) {
    if constexpr (!TileFormat<W>::kInteger) return;
    const int rows = min_of(kTileRows, piece.m - m);
    const void* block = static_cast<const char*>(piece.x) + m * piece.x_stride;
    scale_ = load_n(int8_scales(block, rows, piece.w.k), rows);
  }

  Vec load_row(const float (&sums)[kMaxRows]) const {
    if constexpr (!TileFormat<W>::kInteger) return load(sums + m_);
    return Vec{_mm512_cvtepi32_ps(_mm512_load_si512(sums + m_))} * scale_;
  }

 private:
  int m_;
  Vec scale_ = set1(1.0f);
};

// ---- the two operations ---------------------------------------------------------------------------------------------

template <class W>
void linear(const Piece& piece, const Output& out) {
  Workspace& space = workspace();
  multiply<W>(piece, piece.row, piece.row + piece.n, space.sums[0]);
  for (int m = 0; m < piece.m; m += kTileRows) {
    const RowBlockSums<W> sums(piece, m);
    for (int n = 0; n < piece.n; n += kTileRows) {
      __m512i v[kTileRows];
      for (int r = 0; r < kTileRows; ++r) v[r] = _mm512_castps_si512(sums.load_row(space.sums[0][n + r]).v);
      transpose_16x16(v);
      for (int r = 0; r < kTileRows; ++r) _mm512_store_si512(&space.rows[r][n], v[r]);
    }
    Piece block = piece;
    block.m = min_of(kTileRows, piece.m - m);
    Output block_out = out;
    block_out.y = static_cast<char*>(out.y) + m * out.stride * sizeof(bf16);
    store_linear(space.rows[0], kMaxColumns, block, block_out);
  }
}

// Rounds and interleaves a and b, 16 values each: a0 b0 a1 b1 ...
__m512i to_bf16_pairs(Vec a, Vec b) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a.v));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(b.v));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Where element n of a row of h lies in the packed row. Even elements and their successors are neighbours.
template <class W>
int64_t packed_place(int64_t n) {
  if constexpr (!std::is_same_v<W, fp8>) return n;
  return n / 64 * 64 + n % 16 / 8 * 32 + n % 64 / 16 * 8 + n % 8;  // as in_fp8_order
}

template <class W>
void gate_up(const Piece& piece, void* h, int64_t h_stride) {
  Workspace& space = workspace();
  const int64_t inner = piece.w.n / 2;
  multiply<W>(piece, piece.row, piece.up_row, space.sums[0]);
  multiply<W>(piece, piece.up_row, piece.row + piece.n, space.sums[1]);
  const float* gate_scale = row_scale(piece.w, piece.row);
  const float* up_scale = row_scale(piece.w, piece.up_row);
  const bool last = piece.n0 + piece.n == inner;
  const int64_t end = last ? round_up(inner, TileFormat<W>::kUnit) - piece.n0 : piece.n;  // zeros up to a whole unit
  for (int m = 0; m < piece.m; m += kTileRows) {
    const int rows = min_of(kTileRows, piece.m - m);
    const RowBlockSums<W> sums(piece, m);
    const auto value = [&](int64_t n) {
      if (n >= piece.n) return zero();
      const Vec gate = sums.load_row(space.sums[0][n]), up = sums.load_row(space.sums[1][n]);
      const float limit = piece.w.limit;
      return gate_scale == nullptr ? swiglu(gate, up, limit)
                                   : swiglu(gate * set1(gate_scale[n]), up * set1(up_scale[n]), limit);
    };
    char* block = static_cast<char*>(h) + m * h_stride;
    for (int64_t n = 0; n < end; n += 2) {
      char* out = block + packed_place<W>(piece.n0 + n) * rows * sizeof(bf16);
      _mm512_mask_storeu_epi32(out, lanes(rows), to_bf16_pairs(value(n), value(n + 1)));
    }
  }
}

constexpr GemmKernels kBf16Kernels{
    bf16_row_bytes<false>, pack_bf16<false>, linear<bf16>, gate_up<bf16>, kMaxRows, kStripe, nullptr};
constexpr GemmKernels kFp8Kernels{
    bf16_row_bytes<true>, pack_bf16<true>, linear<fp8>, gate_up<fp8>, kMaxRows, kStripe, nullptr};
constexpr GemmKernels kInt8Kernels{int8_row_bytes, pack_int8, linear<int8_t>, gate_up<int8_t>,
                                   kMaxRows,       kStripe,   requantize};

}  // namespace

const GemmKernels& gemm_kernels_amx(Dtype x, Dtype w) {
  if (x != Dtype::kBFloat16 || w == Dtype::kFloat32) return gemm_kernels_avx512(x, w);
  return w == Dtype::kBFloat16 ? kBf16Kernels : w == Dtype::kFp8E4M3 ? kFp8Kernels : kInt8Kernels;
}

}  // namespace eprt
