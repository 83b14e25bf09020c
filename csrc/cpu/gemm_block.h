// The product of one piece, for the instruction sets that multiply vectors along K (all but AMX).
//
// Included by gemm_<isa>.cpp. Everything is in an anonymous namespace for the reason in isa.h.
// A `Math` class supplies the vectors:
//   X                      element of packed activations, and of weights once dequantised
//   Operand, Sum           kStep elements of X; a vector of partial sums
//   load(const T*)         an Operand from kStep elements, T: X or a stored weight type;  store(X*, Operand)
//   load_scaled(p, scale)  the same times an fp8 block's scale, if kFoldsScale
//   kPairs<T>              whether load_pair(const T*, scale, first, second) loads two Operands at less cost than two
//                          loads; for fp8 if kFoldsScale, times *scale
//   zero(), mul_add(x, w, sum), add_scaled(total, sum, scale)
//   add_reduced<ROWS, COLS>(sums, out, ld)   out[r][c] += the sum of the lanes of sums[r][c], added in one fixed order
//   kTile, kScaledTile     shape of the register tile: plain, and with one sum per fp8 block besides the total
//   direct_columns(rows, scaled_sums)        columns of the tile that dequantises in registers; 0: too many rows
//   kDirectRows            up to so many rows, weights other than fp8 are dequantised in registers, if need be twice
//
// Order of summation over K, the same for every row and column: stretches of kDepth elements; within a stretch lane i
// adds elements i, i + kStep, ...; the lanes are summed and the result is added to the total. An fp8 block's scale
// multiplies its weights if X is float (kFoldsScale), otherwise the block's partial sums.
#pragma once

#include <memory>
#include <type_traits>

#include "cpu/convert.h"
#include "cpu/gemm_epilogue.h"

namespace eprt {
namespace {

struct TileShape {
  int rows, cols;
};

// Elements of a stretch of K: 4 KB per row, so that a tile's weight rows stay in L1. A multiple of kFp8Block.
template <class Math>
constexpr int64_t kDepth = 4096 / sizeof(typename Math::X);

// Up to so many rows, a tile dequantises pairs of operands: with more, their registers are needed for sums.
constexpr int kPairRows = 4;

// ---- the register tile ----------------------------------------------------------------------------------------------

// Weights to prefetch: while element k of the tile is multiplied, the lines at base + c * row_bytes + k * k_bytes are
// fetched, for c in 0..COLS - 1.
struct Prefetch {
  const char* base;
  int64_t row_bytes, k_bytes;
};

// What a tile multiplies: rows of x, x_stride elements apart, by COLS weight rows, over k elements.
template <class X, class W, int COLS>
struct TileInput {
  const X* x;
  int64_t x_stride;
  int64_t k;
  const W* w[COLS];
  const float* scale[COLS];  // scale of w's first block, followed by those of the next blocks; read only if SCALED
  Prefetch next;             // read only if PREFETCH
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

template <class Math, int ROWS, int COLS>
[[gnu::always_inline]] inline void clear(typename Math::Sum (&sum)[ROWS][COLS]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) sum[r][c] = Math::zero();
  }
}

// sum[r][c] += x(r) * w(c). The shorter side stays in registers; the other is loaded one operand at a time.
template <class Math, int ROWS, int COLS, class LoadX, class LoadW>
[[gnu::always_inline]] inline void outer_product(LoadX&& load_x, LoadW&& load_w,
                                                 typename Math::Sum (&sum)[ROWS][COLS]) {
  typename Math::Operand held[ROWS <= COLS ? ROWS : COLS];
  if constexpr (ROWS <= COLS) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) held[r] = load_x(r);
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) {
      const auto w = load_w(c);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) sum[r][c] = Math::mul_add(held[r], w, sum[r][c]);
    }
  } else {
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) held[c] = load_w(c);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const auto x = load_x(r);
#pragma GCC unroll 8
      for (int c = 0; c < COLS; ++c) sum[r][c] = Math::mul_add(x, held[c], sum[r][c]);
    }
  }
}

// Adds the products of elements [k, end) to sum[r][c]. If SCALED they lie in fp8 block `block`. WHOLE: end - k is a
// multiple of kStep.
template <class Math, bool SCALED, bool PREFETCH, bool WHOLE, class W, int ROWS, int COLS>
[[gnu::always_inline]] inline void accumulate(const TileInput<typename Math::X, W, COLS>& in, int64_t k, int64_t end,
                                              int64_t block, typename Math::Sum (&sum)[ROWS][COLS]) {
  const auto scale = [&](int c) { return SCALED ? in.scale[c] + block : nullptr; };
  const auto prefetch = [&] {
    if (!PREFETCH || k % (64 / sizeof(W)) != 0) return;
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) __builtin_prefetch(in.next.base + c * in.next.row_bytes + k * in.next.k_bytes);
  };
  if constexpr (Math::template kPairs<W> && ROWS <= kPairRows) {
    for (; k + 2 * Math::kStep <= end; k += 2 * Math::kStep) {
      prefetch();
#pragma GCC unroll 8
      for (int c = 0; c < COLS; ++c) {
        typename Math::Operand first, second;
        Math::load_pair(in.w[c] + k, scale(c), first, second);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const auto* x = in.x + r * in.x_stride + k;
          sum[r][c] = Math::mul_add(Math::load(x), first, sum[r][c]);
          sum[r][c] = Math::mul_add(Math::load(x + Math::kStep), second, sum[r][c]);
        }
      }
    }
  }
  for (; k + Math::kStep <= end; k += Math::kStep) {
    prefetch();
    outer_product<Math>([&](int r) { return Math::load(in.x + r * in.x_stride + k); },
                        [&](int c) { return load_weight<Math, SCALED>(in.w[c] + k, scale(c)); }, sum);
  }
  if (WHOLE || k == end) return;
  const int count = static_cast<int>(static_cast<unsigned>(end - k) % Math::kStep);
  outer_product<Math>([&](int r) { return load_tail<Math>(in.x + r * in.x_stride + k, count); },
                      [&](int c) { return load_weight_tail<Math, SCALED>(in.w[c] + k, scale(c), count); }, sum);
}

// Adds the products of the elements of one fp8 block, times its scale.
template <class Math, bool PREFETCH, bool WHOLE, class W, int ROWS, int COLS>
[[gnu::always_inline]] inline void accumulate_block(const TileInput<typename Math::X, W, COLS>& in, int64_t k,
                                                    int64_t end, int64_t block,
                                                    typename Math::Sum (&total)[ROWS][COLS]) {
  if constexpr (Math::kFoldsScale) {
    accumulate<Math, true, PREFETCH, WHOLE>(in, k, end, block, total);
  } else {
    typename Math::Sum sum[ROWS][COLS];
    clear<Math>(sum);
    accumulate<Math, true, PREFETCH, WHOLE>(in, k, end, block, sum);
#pragma GCC unroll 8
    for (int c = 0; c < COLS; ++c) {
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) total[r][c] = Math::add_scaled(total[r][c], sum[r][c], in.scale[c][block]);
    }
  }
}

// out[r][c] += the product, for `count` tiles below each other.
template <class Math, bool SCALED, bool PREFETCH, class W, int ROWS, int COLS>
[[gnu::noinline]] void tiles(const TileInput<typename Math::X, W, COLS>& input, int count, float* out, int64_t ld) {
  TileInput<typename Math::X, W, COLS> in = input;
  for (; count > 0; --count, in.x += ROWS * in.x_stride, out += ROWS * ld) {
    for (int64_t k = 0; k < in.k; k += kDepth<Math>) {
      const int64_t end = min_of(k + kDepth<Math>, in.k);
      typename Math::Sum total[ROWS][COLS];
      clear<Math>(total);
      if constexpr (SCALED) {
        int64_t begin = k, block = k / kFp8Block;
        for (; begin + kFp8Block <= end; begin += kFp8Block, ++block) {
          accumulate_block<Math, PREFETCH, true>(in, begin, begin + kFp8Block, block, total);
        }
        if (begin < end) accumulate_block<Math, PREFETCH, false>(in, begin, end, block, total);
      } else {
        accumulate<Math, false, PREFETCH, false>(in, k, end, 0, total);
      }
      Math::template add_reduced<ROWS, COLS>(&total[0][0], out, ld);
    }
  }
}

// ---- a piece --------------------------------------------------------------------------------------------------------

// Calls run<rows>() for a number of rows that is known at run time, 1..MAX; does nothing for 0 rows.
template <int MAX, class Run>
void with_rows(int rows, Run&& run) {
  if constexpr (MAX > 0) {
    if (rows == MAX) return run.template operator()<MAX>();
    with_rows<MAX - 1>(rows, run);
  }
}

// Adds a piece times weight rows [row0, row0 + n), without int8 row scales, to sums[m][ld].
template <class Math, class W>
struct Product {
  using X = typename Math::X;
  static constexpr bool kScaled = std::is_same_v<W, fp8>;
  static constexpr bool kScaledSums = kScaled && !Math::kFoldsScale;

  const Piece& piece;
  int64_t row0;
  float* sums;
  int64_t ld;

  void run(X* panel) const {
    constexpr int kMaxRows = [] {
      int rows = 1;
      while (Math::direct_columns(rows + 1, kScaledSums) > 0) ++rows;
      return rows;
    }();
    constexpr int kMaxRest = kScaled ? 0 : Math::kDirectRows - kMaxRows;
    if (piece.m <= kMaxRows) {
      return with_rows<kMaxRows>(piece.m, [&]<int ROWS>() { direct<ROWS, 0>(); });
    }
    if (piece.m <= kMaxRows + kMaxRest) {
      return with_rows<kMaxRest>(piece.m - kMaxRows, [&]<int REST>() { direct<kMaxRows, REST>(); });
    }
    for (int64_t k = 0; k < piece.w.k; k += kDepth<Math>) paneled(k, min_of(kDepth<Math>, piece.w.k - k), panel);
  }

 private:
  // Few rows, in a tile of ROWS and one of REST: weights are dequantised in registers. The weights of the next tile of
  // columns are prefetched in their order in memory.
  template <int ROWS, int REST>
  void direct() const {
    constexpr int kCols = Math::direct_columns(ROWS, kScaledSums);
    TileInput<X, W, kCols> in{.x = x(0), .x_stride = x_stride(), .k = piece.w.k, .w = {}, .scale = {}, .next = {}};
    for (int column = 0; column < piece.n; column += kCols) {
      for (int c = 0; c < kCols; ++c) {
        in.w[c] = weights(column + c, 0);
        if constexpr (kScaled) in.scale[c] = block_scale(column + c, 0);
      }
      in.next = {reinterpret_cast<const char*>(in.w[0] + next_tile<kCols>(column)), 64, kCols * sizeof(W)};
      in.x = x(0);
      tiles<Math, kScaled, true, W, ROWS, kCols>(in, 1, sums + column, ld);
      if constexpr (REST > 0) {
        in.x += ROWS * in.x_stride;
        tiles<Math, kScaled, false, W, REST, kCols>(in, 1, sums + ROWS * ld + column, ld);
      }
    }
  }

  // Many rows: one stretch of K of a tile's weight rows is dequantised into `panel` and multiplied by all rows of the
  // piece. Weights of type X are multiplied in place.
  void paneled(int64_t k0, int64_t k, X* panel) const {
    constexpr bool kInPlace = std::is_same_v<W, X>;
    constexpr int kRows = (kScaledSums ? Math::kScaledTile : Math::kTile).rows;
    constexpr int kCols = (kScaledSums ? Math::kScaledTile : Math::kTile).cols;
    const int full = piece.m / kRows;
    const int64_t row_bytes = piece.w.k * sizeof(W);
    TileInput<X, X, kCols> in{.x = nullptr, .x_stride = x_stride(), .k = k, .w = {}, .scale = {}, .next = {}};
    for (int column = 0; column < piece.n; column += kCols) {
      const int64_t next = next_tile<kCols>(column);
      for (int c = 0; c < kCols; ++c) {
        const W* w = weights(column + c, k0);
        if constexpr (kScaledSums) in.scale[c] = block_scale(column + c, k0);
        if constexpr (kInPlace) {
          in.w[c] = w;
        } else {
          in.w[c] = dequantize(w, kScaled ? block_scale(column + c, k0) : nullptr, k, next, panel + c * kDepth<Math>);
        }
      }
      in.next = {reinterpret_cast<const char*>(weights(column, k0) + next), row_bytes, sizeof(W)};
      float* out = sums + column;
      in.x = x(k0);
      tiles<Math, kScaledSums, kInPlace, X, kRows, kCols>(in, full > 0, out, ld);
      in.x += kRows * in.x_stride;
      tiles<Math, kScaledSums, false, X, kRows, kCols>(in, full - 1, out + kRows * ld, ld);
      in.x += (full - 1) * kRows * in.x_stride;
      with_rows<kRows - 1>(piece.m - full * kRows, [&]<int ROWS>() {
        tiles<Math, kScaledSums, false, X, ROWS, kCols>(in, 1, out + full * kRows * ld, ld);
      });
    }
  }

  // Dequantises k elements of a weight row into `out`; prefetches those `next` elements further on.
  static const X* dequantize(const W* w, const float* scale, int64_t k, int64_t next, X* out) {
    int64_t i = 0;
    if constexpr (Math::template kPairs<W>) {
      for (; i + 2 * Math::kStep <= k; i += 2 * Math::kStep) {
        __builtin_prefetch(w + (i + next));
        typename Math::Operand first, second;
        Math::load_pair(w + i, kScaled ? scale + i / kFp8Block : nullptr, first, second);
        Math::store(out + i, first);
        Math::store(out + i + Math::kStep, second);
      }
    }
    for (; i + Math::kStep <= k; i += Math::kStep) {
      if (i % (64 / sizeof(W)) == 0) __builtin_prefetch(w + (i + next));
      Math::store(out + i, load_weight<Math, kScaled>(w + i, kScaled ? scale + i / kFp8Block : nullptr));
    }
    if (i < k) {
      const float* s = kScaled ? scale + i / kFp8Block : nullptr;
      Math::store(out + i, load_weight_tail<Math, kScaled>(
                               w + i, s, static_cast<int>(static_cast<unsigned>(k - i) % Math::kStep)));
    }
    return out;
  }

  const X* x(int64_t k0) const { return static_cast<const X*>(piece.x) + k0; }
  int64_t x_stride() const { return piece.x_stride / static_cast<int64_t>(sizeof(X)); }

  // Past the piece's last column a tile reads the last weight row again; the result is never stored.
  int64_t weight_row(int column) const { return row0 + min_of(column, piece.n - 1); }

  const W* weights(int column, int64_t k0) const {
    return static_cast<const W*>(piece.w.data) + weight_row(column) * piece.w.k + k0;
  }

  const float* block_scale(int column, int64_t k0) const {
    return piece.w.scale + weight_row(column) / kFp8Block * div_up(piece.w.k, kFp8Block) + k0 / kFp8Block;
  }

  // Elements from a tile's weights to those of the next tile; 0 at the end of the matrix.
  template <int COLS>
  int64_t next_tile(int column) const {
    return row0 + column + 2 * COLS <= piece.w.n ? COLS * piece.w.k : 0;
  }
};

// ---- the kernels of one Math ----------------------------------------------------------------------------------------

constexpr int kBlockMaxRows = 64;
constexpr int kBlockColumnUnit = 16;  // any value is correct: a last tile of fewer columns wastes the others

template <class Math>
struct BlockKernels {
  using X = typename Math::X;
  static constexpr int64_t kLd = kMaxColumns + 16;  // tiles add up to 7 columns past the piece

  struct Workspace {
    alignas(64) float sums[2][kBlockMaxRows * kLd];
    alignas(64) X panel[8 * kDepth<Math>];
  };

  static Workspace& workspace() {
    static thread_local const std::unique_ptr<Workspace> space(new Workspace);
    return *space;
  }

  // sums[m][kLd] = x times weight rows [row0, row0 + n), without int8 row scales.
  static void multiply(const Piece& piece, int64_t row0, float* sums) {
    std::memset(sums, 0, piece.m * kLd * sizeof(float));
    switch (piece.w.dtype) {
      case Dtype::kFloat32:
        if constexpr (std::is_same_v<X, float>) run<float>(piece, row0, sums);
        break;
      case Dtype::kBFloat16:
        return run<bf16>(piece, row0, sums);
      case Dtype::kFp8E4M3:
        return run<fp8>(piece, row0, sums);
      case Dtype::kInt8:
        return run<int8_t>(piece, row0, sums);
      case Dtype::kFp4:
        break;  // gemm.cpp widens it
    }
  }

  template <class W>
  static void run(const Piece& piece, int64_t row0, float* sums) {
    Product<Math, W>{.piece = piece, .row0 = row0, .sums = sums, .ld = kLd}.run(workspace().panel);
  }

  static void linear(const Piece& piece, const Output& out) {
    Workspace& space = workspace();
    multiply(piece, piece.row, space.sums[0]);
    store_linear(space.sums[0], kLd, piece, out);
  }

  static void gate_up(const Piece& piece, void* h, int64_t h_stride) {
    Workspace& space = workspace();
    multiply(piece, piece.row, space.sums[0]);
    multiply(piece, piece.up_row, space.sums[1]);
    store_gate_up<X>(space.sums[0], space.sums[1], kLd, piece, h, h_stride);
  }

  static int64_t packed_row_bytes(int64_t k) { return round_up(k * sizeof(X), 64); }
};

inline void widen_rows(const void* x, int64_t x_stride, int64_t m, int64_t k, void* packed, int64_t packed_stride) {
  for (int64_t row = 0; row < m; ++row) {
    convert(reinterpret_cast<const bf16*>(static_cast<const char*>(x) + row * x_stride), k,
            reinterpret_cast<float*>(static_cast<char*>(packed) + row * packed_stride));
  }
}

// The kernels that multiply in fp32: bfloat16 activations are widened first.
template <class Math>
const GemmKernels& float_kernels(Dtype x) {
  using Kernels = BlockKernels<Math>;
  static constexpr GemmKernels kAsIs{Kernels::packed_row_bytes, nullptr,       Kernels::linear,
                                     Kernels::gate_up,          kBlockMaxRows, kBlockColumnUnit};
  static constexpr GemmKernels kWidened{Kernels::packed_row_bytes, widen_rows,    Kernels::linear,
                                        Kernels::gate_up,          kBlockMaxRows, kBlockColumnUnit};
  return x == Dtype::kFloat32 ? kAsIs : kWidened;
}

}  // namespace
}  // namespace eprt
