// The bf16 products of mla_gemm.h on AMX tiles, for the files compiled with AMX.
//
// A tile instruction computes C[16][16] += A[16][32] B[32][16] on bf16 pairs, which are the words of mla_gemm.h, so A
// and B need no repacking. Two by two tiles of C are summed over all of k at a time. The rest of k after whole tiles is
// copied and padded with zeros, so a product of k words equals one that is padded to any length.
#pragma once

#ifdef EPRT_EMULATE_AMX
#include "cpu/amx_emulation.h"
#endif
#include "cpu/mla_pack.h"

namespace eprt {
namespace {

constexpr int kTile = 16;             // rows of a tile, and its words per row
constexpr int kTilePair = 2 * kTile;  // rows and columns of C at a time
constexpr int kMaxStridedWords = 64;  // of an A whose words are not contiguous

// Orders earlier stores before later tile loads: GCC's tile intrinsics do not declare which memory they read.
inline void settle() { asm volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0, 1: C of the upper rows, 2, 3: of the lower ones; 4, 5: A of both; 6, 7: B.
inline void configure_tiles(int64_t rows) {
  TileConfig config;
  const int upper = static_cast<int>(min_of<int64_t>(rows, kTile)), lower = static_cast<int>(rows) - upper;
  const int tile_rows[8] = {upper, upper, lower, lower, upper, lower, kTile, kTile};
  for (int t = 0; t < 8; ++t) {
    if (tile_rows[t] == 0) continue;
    config.row_bytes[t] = 64;
    config.rows[t] = static_cast<uint8_t>(tile_rows[t]);
  }
  settle();
  _tile_loadconfig(&config);
}

// The rest of k after whole tiles, padded with zeros.
struct Remainder {
  alignas(64) Word a[kTilePair][kTile];
  alignas(64) Word b[kTile][kTilePair];
  int64_t num_words;

  void copy_a(MatrixA from, int64_t rows) {
    std::memset(a, 0, sizeof(a));
    for (int64_t i = 0; i < rows; ++i) std::memcpy(a[i], from.data + i * from.row, num_words * sizeof(Word));
  }
  void copy_b(const Word* from, int64_t row, int64_t columns) {
    std::memset(b, 0, sizeof(b));
    for (int64_t k = 0; k < num_words; ++k) std::memcpy(b[k], from + k * row, columns * sizeof(Word));
  }
};

template <bool kLower, bool kRight>
inline void multiply_step(const Word* a, int64_t a_row, const Word* b, int64_t b_row) {
  _tile_loadd(4, a, a_row * 4);
  _tile_loadd(6, b, b_row * 4);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kRight) {
    _tile_loadd(7, b + kTile, b_row * 4);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (kLower) {
    _tile_loadd(5, a + kTile * a_row, a_row * 4);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRight) _tile_dpbf16ps(3, 5, 7);
  }
}

// Up to 32 rows and 32 columns of C; kLower, kRight: more than 16 of them.
template <bool kLower, bool kRight>
inline void multiply_tiles(int64_t num_words, MatrixA a, const Word* b, int64_t b_row, MatrixC c, Remainder& rest) {
  const int64_t stride = c.row * 4;
  float* lower = c.data + kTile * c.row;
  if (c.row_scale) {
    _tile_loadd(0, c.data, stride);
    if constexpr (kRight) _tile_loadd(1, c.data + kTile, stride);
    if constexpr (kLower) _tile_loadd(2, lower, stride);
    if constexpr (kLower && kRight) _tile_loadd(3, lower + kTile, stride);
  } else {
    _tile_zero(0);
    if constexpr (kRight) _tile_zero(1);
    if constexpr (kLower) _tile_zero(2);
    if constexpr (kLower && kRight) _tile_zero(3);
  }
  int64_t k = 0;
  for (; k + kTile <= num_words; k += kTile) multiply_step<kLower, kRight>(a.data + k, a.row, b + k * b_row, b_row);
  if (rest.num_words) {
    rest.copy_b(b + k * b_row, b_row, kRight ? kTilePair : kTile);
    settle();
    multiply_step<kLower, kRight>(rest.a[0], kTile, rest.b[0], kTilePair);
  }
  _tile_stored(0, c.data, stride);
  if constexpr (kRight) _tile_stored(1, c.data + kTile, stride);
  if constexpr (kLower) _tile_stored(2, lower, stride);
  if constexpr (kLower && kRight) _tile_stored(3, lower + kTile, stride);
}

inline void scale_rows(int64_t rows, int64_t columns, MatrixC c) {
  for (int64_t i = 0; i < rows; ++i) {
    if (c.row_scale[i] == 1.0f) continue;  // the running maximum rarely moves after the first blocks
    const Vec scale = set1(c.row_scale[i]);
    float* row = c.data + i * c.row;
    for (int64_t n = 0; n < columns; n += Vec::kWidth) store(row + n, load(row + n) * scale);
  }
}

// Pairs of tiles without rests: rows outside, so that what a pair reads of A stays in L1 while B passes.
inline void gemm_whole_tiles(int64_t rows, int64_t columns, int64_t num_words, MatrixA a, MatrixB<Word> b, MatrixC c) {
  Remainder none;
  none.num_words = 0;
  configure_tiles(kTilePair);
  if (c.row_scale) scale_rows(rows, columns, c);
  settle();
  for (int64_t m = 0; m < rows; m += kTilePair) {
    const MatrixA a_m{a.data + m * a.row, a.row};
    for (int64_t n = 0; n < columns; n += kTilePair) {
      const Word* b_n = b.data + n / kPanel * b.panel + n % kPanel;
      const MatrixC c_mn{c.data + m * c.row + n, c.row, c.row_scale};
      columns - n > kTile ? multiply_tiles<true, true>(num_words, a_m, b_n, b.row, c_mn, none)
                          : multiply_tiles<true, false>(num_words, a_m, b_n, b.row, c_mn, none);
    }
  }
  _tile_release();
}

// gemm of mla_gemm.h, with the same meaning of every argument.
inline void gemm_tiles(int64_t rows, int64_t columns, int64_t num_words, MatrixA a, MatrixB<Word> b, MatrixC c) {
  const bool whole = a.step == 1 && rows % kTilePair == 0 && num_words % kTile == 0;
  if (whole) return gemm_whole_tiles(rows, columns, num_words, a, b, c);
  alignas(64) Word strided[kTilePair * kMaxStridedWords];
  Remainder rest;
  rest.num_words = num_words % kTile;
  int64_t configured = 0;
  for (int64_t m = 0; m < rows; m += kTilePair) {
    const int64_t count = min_of<int64_t>(kTilePair, rows - m);
    if (count != configured) configure_tiles(configured = count);
    MatrixA a_m{a.data + m * a.row, a.row, a.step};
    if (a.step != 1) {
      for (int64_t i = 0; i < count; i += kTile) {
        for (int64_t k = 0; k < num_words; k += kTile) {
          transpose_block(a_m.data + i + k * a.step, a.step, strided + i * kMaxStridedWords + k, kMaxStridedWords);
        }
      }
      a_m = {strided, kMaxStridedWords};
    }
    if (rest.num_words) rest.copy_a({a_m.data + num_words - rest.num_words, a_m.row}, count);
    const MatrixC c_m{c.data + m * c.row, c.row, c.row_scale ? c.row_scale + m : nullptr};
    if (c.row_scale) scale_rows(count, columns, c_m);
    settle();
    for (int64_t n = 0; n < columns; n += kTilePair) {
      const Word* b_n = b.data + n / kPanel * b.panel + n % kPanel;
      const MatrixC c_n{c_m.data + n, c_m.row, c_m.row_scale};
      const bool lower = count > kTile, right = columns - n > kTile;
      if (lower && right) multiply_tiles<true, true>(num_words, a_m, b_n, b.row, c_n, rest);
      if (lower && !right) multiply_tiles<true, false>(num_words, a_m, b_n, b.row, c_n, rest);
      if (!lower && right) multiply_tiles<false, true>(num_words, a_m, b_n, b.row, c_n, rest);
      if (!lower && !right) multiply_tiles<false, false>(num_words, a_m, b_n, b.row, c_n, rest);
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace eprt
