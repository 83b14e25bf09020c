// The matrix products of attention, C (+)= A B, written once for fp32 and for bf16 dot products.
//
// The inner dimension is counted in words of 32 bits: one fp32 value, or two neighbouring bf16 values (Bf16Dot). A is
// read one word at a time and broadcast; B is read a register of columns at a time, so a column's words lie `row`
// apart. Every element of C is summed over k in order, whatever its tile, so a row of C does not depend on how many
// other rows are computed with it. That makes attention batch-invariant.
#pragma once

#include "cpu/vec.h"

namespace eprt {
namespace {

using Word = uint32_t;

inline float float_of(const Word* word) {
  float x;
  std::memcpy(&x, word, 4);
  return x;
}

struct Fp32Dot {  // A and B fp32
  static constexpr int kStep = 1;
  static constexpr bool kTiles = false;
  using BElement = Word;
  using BRegister = Vec;
  static BRegister load_b(const Word* b) { return load(reinterpret_cast<const float*>(b)); }
  static Vec step(Vec acc, const Word* a, BRegister b) { return fma(set1(float_of(a)), b, acc); }
};

struct WidenDot {  // A fp32; B bf16 with consecutive columns, widened when it is read
  static constexpr int kStep = 1;
  static constexpr bool kTiles = false;
  using BElement = bf16;
  using BRegister = Vec;
  static BRegister load_b(const bf16* b) { return load(b); }
  static Vec step(Vec acc, const Word* a, BRegister b) { return fma(set1(float_of(a)), b, acc); }
};

#if defined(__AVX512BF16__)
struct Bf16Dot {  // A and B pairs of bf16
  static constexpr int kStep = 2;
  static constexpr bool kTiles = false;
  using BElement = Word;
  using BRegister = __m512i;
  static BRegister load_b(const Word* b) { return _mm512_loadu_si512(b); }
  static Vec step(Vec acc, const Word* a, BRegister b) {
    int word;
    std::memcpy(&word, a, 4);
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_set1_epi32(word), (__m512bh)b)};
  }
};
#endif

#if defined(__AMX_BF16__)
struct TileDot : Bf16Dot {  // the same on AMX tiles: gemm is gemm_tiles, in mla_gemm_amx.h
  static constexpr bool kTiles = true;
};
#endif

// Registers: kMaxColumns * kWidth columns of B form a panel; the tile heights leave room for B and one broadcast.
#if defined(__AVX512F__)
constexpr int kMaxColumns = 4;
constexpr int tile_rows(int columns) { return columns == 4 ? 6 : columns == 3 ? 8 : columns == 2 ? 12 : 16; }
#else
constexpr int kMaxColumns = 2;
constexpr int tile_rows(int columns) { return columns == 2 ? 6 : 10; }
#endif
constexpr int kPanel = kMaxColumns * Vec::kWidth;

struct MatrixA {  // word (m, k) at data[m * row + k * step]
  const Word* data;
  int64_t row;
  int64_t step = 1;
};

template <class Element>
struct MatrixB {  // (k, n) at data[n / kPanel * panel + k * row + n % kPanel]; readable up to a full register of
                  // columns
  const Element* data;
  int64_t row;
  int64_t panel;
};

// Columns in panels, as transpose_to_panels writes them. width: of a panel; less than kPanel only if there is one
// panel.
inline MatrixB<Word> panels(const Word* data, int64_t num_words, int64_t width = kPanel) {
  return {data, width, num_words * width};
}

struct MatrixC {
  float* data;
  int64_t row;
  const float* row_scale = nullptr;  // if given, C = C * row_scale[m] + A B, otherwise C = A B
};

template <class Dot, int kRows, int kColumns>
inline void gemm_tile(MatrixA a, const typename Dot::BElement* b, int64_t b_row, int64_t num_words, MatrixC c) {
  Vec acc[kRows][kColumns];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      acc[i][j] = c.row_scale ? load(c.data + i * c.row + j * Vec::kWidth) * set1(c.row_scale[i]) : zero();
    }
  }
  for (int64_t k = 0; k < num_words; ++k) {
    typename Dot::BRegister b_j[kColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) b_j[j] = Dot::load_b(b + k * b_row + j * Vec::kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) acc[i][j] = Dot::step(acc[i][j], a.data + i * a.row + k * a.step, b_j[j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) store(c.data + i * c.row + j * Vec::kWidth, acc[i][j]);
  }
}

template <class Dot, int kRows, int kColumns>
inline void gemm_last_rows(int64_t rows, MatrixA a, const typename Dot::BElement* b, int64_t b_row, int64_t num_words,
                           MatrixC c) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return gemm_tile<Dot, kRows, kColumns>(a, b, b_row, num_words, c);
    gemm_last_rows<Dot, kRows - 1, kColumns>(rows, a, b, b_row, num_words, c);
  }
}

template <class Dot, int kColumns>
void gemm_panel(int64_t rows, MatrixA a, const typename Dot::BElement* b, int64_t b_row, int64_t num_words, MatrixC c) {
  constexpr int kRows = tile_rows(kColumns);
  for (; rows >= kRows; rows -= kRows) {
    gemm_tile<Dot, kRows, kColumns>(a, b, b_row, num_words, c);
    a.data += kRows * a.row;
    c.data += kRows * c.row;
    if (c.row_scale) c.row_scale += kRows;
  }
  gemm_last_rows<Dot, kRows - 1, kColumns>(rows, a, b, b_row, num_words, c);
}

#if defined(__AMX_BF16__)
inline void gemm_tiles(int64_t rows, int64_t columns, int64_t num_words, MatrixA a, MatrixB<Word> b, MatrixC c);
#endif

// C [rows, columns] from A [rows, num_words] and B [num_words, columns]. C is written up to a full register of columns.
template <class Dot>
void gemm(int64_t rows, int64_t columns, int64_t num_words, MatrixA a, MatrixB<typename Dot::BElement> b, MatrixC c) {
#if defined(__AMX_BF16__)
  if constexpr (Dot::kTiles) return gemm_tiles(rows, columns, num_words, a, b, c);
#endif
  for (int64_t n = 0; n < columns; n += kPanel) {
    switch (min_of<int64_t>(kMaxColumns, div_up(columns - n, Vec::kWidth))) {
      case 1:
        gemm_panel<Dot, 1>(rows, a, b.data, b.row, num_words, c);
        break;
      case 2:
        gemm_panel<Dot, 2>(rows, a, b.data, b.row, num_words, c);
        break;
#if defined(__AVX512F__)
      case 3:
        gemm_panel<Dot, 3>(rows, a, b.data, b.row, num_words, c);
        break;
      case 4:
        gemm_panel<Dot, 4>(rows, a, b.data, b.row, num_words, c);
        break;
#endif
    }
    b.data += b.panel;
    c.data += kPanel;
  }
}

// ---- a product with (N, K) weights, lanes along K -------------------------------------------------------------------

template <int kRows, class T>
inline void dot_rows_tile(const float* a, int64_t a_row, const T* w, int64_t k_size, int64_t columns, float* c,
                          int64_t c_row) {
  constexpr int kColumns = 4;
  for (int64_t n = 0; n < columns; n += kColumns) {
    const T* w_j[kColumns];
    for (int j = 0; j < kColumns; ++j) w_j[j] = w + min_of<int64_t>(n + j, columns - 1) * k_size;
    Vec acc[kRows][kColumns];
    for (auto& row : acc) {
      for (Vec& x : row) x = zero();
    }
    const auto step = [&](int64_t k, auto load_lanes) {
      Vec a_i[kRows];
      for (int i = 0; i < kRows; ++i) a_i[i] = load_lanes(a + i * a_row + k);
      for (int j = 0; j < kColumns; ++j) {
        const Vec b = load_lanes(w_j[j] + k);
        for (int i = 0; i < kRows; ++i) acc[i][j] = fma(a_i[i], b, acc[i][j]);
      }
    };
    int64_t k = 0;
    for (; k + Vec::kWidth <= k_size; k += Vec::kWidth) step(k, [](auto* p) { return load(p); });
    const int rest = static_cast<int>(k_size - k);
    if (rest) step(k, [rest](auto* p) { return load_n(p, rest); });
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kColumns && n + j < columns; ++j) c[i * c_row + n + j] = reduce_add(acc[i][j]);
    }
  }
}

// C[m, n] = sum_k A[m, k] W[n, k]; A fp32, W fp32 or bf16, both with k contiguous.
template <class T>
void dot_rows(int64_t rows, const float* a, int64_t a_row, const T* w, int64_t k_size, int64_t columns, float* c,
              int64_t c_row) {
  for (; rows >= 4; rows -= 4, a += 4 * a_row, c += 4 * c_row) {
    dot_rows_tile<4>(a, a_row, w, k_size, columns, c, c_row);
  }
  if (rows == 3) dot_rows_tile<3>(a, a_row, w, k_size, columns, c, c_row);
  if (rows == 2) dot_rows_tile<2>(a, a_row, w, k_size, columns, c, c_row);
  if (rows == 1) dot_rows_tile<1>(a, a_row, w, k_size, columns, c, c_row);
}

}  // namespace
}  // namespace eprt
