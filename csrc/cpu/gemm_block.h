// The product of one piece for the instruction sets that multiply vectors along K (all but AMX).
//
// Included by gemm_<isa>.cpp; anonymous namespace because of their differing compiler flags (see isa.h).
// A `Math` class supplies the vectors:
//   X                      element of packed activations, and of weights once dequantised
//   Operand, Sum           kStep elements of X; a vector of partial sums
//   load(const T*)         an Operand from kStep elements, T: X or a stored weight type;  store(X*, Operand)
//   load_scaled(p, scale)  the same times an fp8 block's scale, where kFoldsScale
//   zero(), mul_add(x, w, sum), add_scaled(total, sum, scale)
//   reduce<N>(sums, out)   N Sums to one float each, by one tree of additions for all
//   kMaxRows, kTile        a register tile's rows at most, and sums in all
//
// Order of summation over K, the same for every row and column: stretches of kDepth elements; within one, lane i takes
// elements i, i + kStep, ...; the lanes are reduced and the result is added to the total. An fp8 block's scale
// multiplies its weights where X is float (kFoldsScale), otherwise the block's partial sums.
#pragma once

#include <memory>

#include "cpu/gemm_epilogue.h"

namespace eprt {
namespace {

// A row's stretch of K: 4 KB, so that a tile's weight rows stay in L1. A multiple of kFp8Block.
template <class Math>
constexpr int64_t kDepth = 4096 / sizeof(typename Math::X);

// ---- the register tile ----------------------------------------------------------------------------------------------

// What a tile multiplies: rows of x, x_stride elements apart, with COLS weight rows, over k <= kDepth elements.
template <class X, class W, int COLS>
struct TileInput {
  const X* x;
  int64_t x_stride;
  int64_t k;
  const W* w[COLS];
  const float* scale[COLS];  // scale of w's first block; the following blocks' scales follow. Read only if SCALED.
};

template <class Math, class T>
[[gnu::always_inline]] inline typename Math::Operand load_tail(const T* p, int count) {
  T padded[Math::kStep] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return Math::load(padded);
}

template <class Math, bool SCALED, class W>
[[gnu::always_inline]] inline typename Math::Operand load_weight(const W* w, const float* scale) {
  if constexpr (SCALED && Math::kFoldsScale) {
    return Math::load_scaled(w, *scale);
  } else {
    return Math::load(w);
  }
}

template <class Math, bool SCALED, class W>
[[gnu::always_inline]] inline typename Math::Operand load_weight_tail(const W* w, const float* scale, int count) {
  W padded[Math::kStep] = {};
  std::memcpy(padded, w, count * sizeof(W));
  return load_weight<Math, SCALED>(padded, scale);
}

// Adds to sum[r][c] the products of elements [k, end), which lie in fp8 block `block` if SCALED.
template <class Math, bool SCALED, class W, int ROWS, int COLS>
[[gnu::always_inline]] inline void accumulate(const TileInput<typename Math::X, W, COLS>& in, int64_t k, int64_t end,
                                              int64_t block, typename Math::Sum (&sum)[ROWS][COLS]) {
  typename Math::Operand x[ROWS];
  for (; k + Math::kStep <= end; k += Math::kStep) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) x[r] = Math::load(in.x + r * in.x_stride + k);
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) {
      const auto w = load_weight<Math, SCALED>(in.w[c] + k, SCALED ? in.scale[c] + block : nullptr);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) sum[r][c] = Math::mul_add(x[r], w, sum[r][c]);
    }
  }
  if (k == end) return;
  const int count = static_cast<int>(end - k);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) x[r] = load_tail<Math>(in.x + r * in.x_stride + k, count);
#pragma GCC unroll 8
  for (int c = 0; c < COLS; ++c) {
    const auto w = load_weight_tail<Math, SCALED>(in.w[c] + k, SCALED ? in.scale[c] + block : nullptr, count);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sum[r][c] = Math::mul_add(x[r], w, sum[r][c]);
  }
}

template <class Math, int ROWS, int COLS>
[[gnu::always_inline]] inline void clear(typename Math::Sum (&sum)[ROWS][COLS]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) sum[r][c] = Math::zero();
  }
}

// out[r][c] += sum over one stretch of K.
template <class Math, bool SCALED, class W, int ROWS, int COLS>
[[gnu::noinline]] void tile(const TileInput<typename Math::X, W, COLS>& input, float* out, int64_t ld) {
  const TileInput<typename Math::X, W, COLS> in = input;
  typename Math::Sum total[ROWS][COLS];
  clear<Math>(total);
  if constexpr (!SCALED) {
    accumulate<Math, false>(in, 0, in.k, 0, total);
  } else {
    for (int64_t k = 0, block = 0; k < in.k; k += kFp8Block, ++block) {
      const int64_t end = k + kFp8Block < in.k ? k + kFp8Block : in.k;
      if constexpr (Math::kFoldsScale) {
        accumulate<Math, true>(in, k, end, block, total);
      } else {
        typename Math::Sum sum[ROWS][COLS];
        clear<Math>(sum);
        accumulate<Math, true>(in, k, end, block, sum);
#pragma GCC unroll 8
        for (int c = 0; c < COLS; ++c) {
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) total[r][c] = Math::add_scaled(total[r][c], sum[r][c], in.scale[c][block]);
        }
      }
    }
  }
  float reduced[round_up(ROWS * COLS, kLanes)];
  Math::template reduce<ROWS * COLS>(&total[0][0], reduced);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) out[r * ld + c] += reduced[r * COLS + c];
  }
}

// ---- one stretch of K of a piece ------------------------------------------------------------------------------------

// Columns of a tile of `rows` rows: what the registers hold, and at most 8 weight rows read side by side.
template <class Math, bool SCALED>
constexpr int tile_columns(int rows) {
  const int sums = SCALED && !Math::kFoldsScale ? Math::kTile / 2 : Math::kTile;
  return sums / rows < 8 ? sums / rows : 8;
}

// The product over one stretch of K: columns [0, n) of the piece, weights from row `row0` and element `k0` on.
template <class Math>
struct Stretch {
  using X = typename Math::X;
  const Piece& piece;
  int64_t row0;
  int64_t k0, k;
  float* sums;
  int64_t ld;

  const X* x(int row) const {
    return reinterpret_cast<const X*>(static_cast<const char*>(piece.x) + row * piece.x_stride) + k0;
  }

  // Past the piece's last column a tile reads the last weight row again; what it adds there is never stored.
  int64_t weight_row(int column) const { return row0 + (column < piece.n ? column : piece.n - 1); }

  const float* block_scale(int column) const {
    const int64_t blocks_k = (piece.w.k + kFp8Block - 1) / kFp8Block;
    return piece.w.scale + weight_row(column) / kFp8Block * blocks_k + k0 / kFp8Block;
  }

  template <class W>
  const W* weights(int column) const {
    return static_cast<const W*>(piece.w.data) + weight_row(column) * piece.w.k + k0;
  }

  // Few rows: weights are dequantised in registers, each once per tile.
  template <bool SCALED, class W, int ROWS>
  void direct(int row) const {
    constexpr int kCols = tile_columns<Math, SCALED>(ROWS);
    TileInput<X, W, kCols> in{.x = x(row), .x_stride = x_stride(), .k = k, .w = {}, .scale = {}};
    for (int column = 0; column < piece.n; column += kCols) {
      for (int c = 0; c < kCols; ++c) {
        in.w[c] = weights<W>(column + c);
        if constexpr (SCALED) in.scale[c] = block_scale(column + c);
      }
      tile<Math, SCALED, W, ROWS, kCols>(in, sums + row * ld + column, ld);
    }
  }

  // Many rows: a tile's weight rows are dequantised once into `panel` (plain X weights stay where they are), then
  // multiplied with all rows of the piece.
  template <bool SCALED, class W>
  void paneled(X* panel) const {
    constexpr bool kPlain = std::is_same_v<W, X>;
    constexpr bool kScaledTile = SCALED && !Math::kFoldsScale;
    constexpr int kCols = tile_columns<Math, kScaledTile>(Math::kMaxRows);
    const int tiles = (piece.m + Math::kMaxRows - 1) / Math::kMaxRows;
    TileInput<X, X, kCols> in{.x = nullptr, .x_stride = x_stride(), .k = k, .w = {}, .scale = {}};
    for (int column = 0; column < piece.n; column += kCols) {
      for (int c = 0; c < kCols; ++c) {
        if constexpr (kPlain) {
          in.w[c] = weights<X>(column + c);
        } else {
          X* row = panel + c * kDepth<Math>;
          dequantize<SCALED>(weights<W>(column + c), SCALED ? block_scale(column + c) : nullptr, row);
          in.w[c] = row;
        }
        if constexpr (kScaledTile) in.scale[c] = block_scale(column + c);
      }
      for (int t = 0; t < tiles; ++t) {
        const int row = piece.m * t / tiles, rows = piece.m * (t + 1) / tiles - row;
        in.x = x(row);
        tile_of<kScaledTile, kCols>(rows, in, sums + row * ld + column);
      }
    }
  }

  template <bool SCALED, class W>
  void multiply(X* panel) const {
    switch (piece.m) {
      case 1:
        return direct<SCALED, W, 1>(0);
      case 2:
        return direct<SCALED, W, 2>(0);
      case 3:
        return direct<SCALED, W, 3>(0);
      case 4:
        if constexpr (Math::kMaxRows >= 4) return direct<SCALED, W, 4>(0);
        [[fallthrough]];
      default:
        return paneled<SCALED, W>(panel);
    }
  }

 private:
  int64_t x_stride() const { return piece.x_stride / static_cast<int64_t>(sizeof(X)); }

  template <bool SCALED, class W>
  void dequantize(const W* w, const float* scale, X* out) const {
    int64_t i = 0;
    for (; i + Math::kStep <= k; i += Math::kStep) {
      Math::store(out + i, load_weight<Math, SCALED>(w + i, SCALED ? scale + i / kFp8Block : nullptr));
    }
    if (i < k) {
      const float* s = SCALED ? scale + i / kFp8Block : nullptr;
      Math::store(out + i, load_weight_tail<Math, SCALED>(w + i, s, static_cast<int>(k - i)));
    }
  }

  template <bool SCALED, int COLS>
  void tile_of(int rows, const TileInput<X, X, COLS>& in, float* out) const {
    switch (rows) {
      case 1:
        return tile<Math, SCALED, X, 1, COLS>(in, out, ld);
      case 2:
        return tile<Math, SCALED, X, 2, COLS>(in, out, ld);
      case 3:
        return tile<Math, SCALED, X, 3, COLS>(in, out, ld);
      default:
        if constexpr (Math::kMaxRows >= 4) return tile<Math, SCALED, X, 4, COLS>(in, out, ld);
    }
  }
};

// ---- the kernels of one Math ----------------------------------------------------------------------------------------

constexpr int kBlockMaxRows = 64;

template <class Math>
struct BlockKernels {
  using X = typename Math::X;
  static constexpr int64_t kLd = kMaxColumns + kLanes;  // tiles may write up to 7 columns past the piece

  struct Workspace {
    alignas(64) float sums[2][kBlockMaxRows * kLd];
    alignas(64) X panel[8 * kDepth<Math>];
  };

  static Workspace& workspace() {
    static thread_local const std::unique_ptr<Workspace> space(new Workspace);
    return *space;
  }

  // sums[m][kLd] = x times weight rows [row0, row0 + n), int8 row scales left out.
  static void multiply(const Piece& piece, int64_t row0, float* sums) {
    std::memset(sums, 0, piece.m * kLd * sizeof(float));
    for (int64_t k0 = 0; k0 < piece.w.k; k0 += kDepth<Math>) {
      const int64_t k = piece.w.k - k0 < kDepth<Math> ? piece.w.k - k0 : kDepth<Math>;
      const Stretch<Math> stretch{.piece = piece, .row0 = row0, .k0 = k0, .k = k, .sums = sums, .ld = kLd};
      X* panel = workspace().panel;
      switch (piece.w.dtype) {
        case Dtype::kFloat32:
          if constexpr (std::is_same_v<X, float>) stretch.template multiply<false, float>(panel);
          break;
        case Dtype::kBFloat16:
          stretch.template multiply<false, bf16>(panel);
          break;
        case Dtype::kFp8E4M3:
          stretch.template multiply<true, fp8>(panel);
          break;
        case Dtype::kInt8:
          stretch.template multiply<false, int8_t>(panel);
          break;
      }
    }
  }

  static void linear(const Piece& piece, const Output& out) {
    Workspace& space = workspace();
    multiply(piece, piece.n0, space.sums[0]);
    store_linear(space.sums[0], kLd, piece, out);
  }

  static void gate_up(const Piece& piece, void* h, int64_t h_stride) {
    Workspace& space = workspace();
    multiply(piece, piece.n0, space.sums[0]);
    multiply(piece, piece.w.n / 2 + piece.n0, space.sums[1]);
    constexpr Dtype kDtype = std::is_same_v<X, float> ? Dtype::kFloat32 : Dtype::kBFloat16;
    store_gate_up(space.sums[0], space.sums[1], kLd, piece, kDtype, h, h_stride);
  }

  static int64_t packed_row_bytes(int64_t k) { return round_up(k * sizeof(X), 64); }
};

inline void widen_rows(const void* x, int64_t x_stride, int64_t m, int64_t k, void* packed, int64_t packed_stride) {
  for (int64_t row = 0; row < m; ++row) {
    const bf16* in = reinterpret_cast<const bf16*>(static_cast<const char*>(x) + row * x_stride);
    float* out = reinterpret_cast<float*>(static_cast<char*>(packed) + row * packed_stride);
    for (int64_t i = 0; i < k; ++i) out[i] = to_float(in[i]);
  }
}

// Kernels that multiply in fp32: bfloat16 activations are widened first.
template <class Math>
const GemmKernels& float_kernels(Dtype x) {
  using Kernels = BlockKernels<Math>;
  static constexpr GemmKernels kAsIs{Kernels::packed_row_bytes, nullptr, Kernels::linear, Kernels::gate_up,
                                     kBlockMaxRows};
  static constexpr GemmKernels kWidened{Kernels::packed_row_bytes, widen_rows, Kernels::linear, Kernels::gate_up,
                                        kBlockMaxRows};
  return x == Dtype::kFloat32 ? kAsIs : kWidened;
}

}  // namespace
}  // namespace eprt
