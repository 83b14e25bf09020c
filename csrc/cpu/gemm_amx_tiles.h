// Tile registers of gemm_amx.cpp: their configuration, and the innermost loop.
//
// C: tiles 0 and 1 (weight rows 0-15 and 16-31 of the stripe) for the first row block, 2 and 3 for the second. A: 4
// and 5. B: 6 and 7. A row of an A tile has 64 bytes of one weight row: a step of K.
#pragma once

#ifdef EPRT_EMULATE_AMX
#include "cpu/amx_emulation.h"
#else
#include <immintrin.h>
#endif

#include <cstdint>

namespace eprt {
namespace {

constexpr int kTileRows = 16;           // rows of every tile, columns of C
constexpr int kStepBytes = 64;          // of a weight row in a tile
constexpr int kMaxRows = 256;           // of a piece
constexpr int kStripe = 2 * kTileRows;  // weight rows multiplied side by side

// GCC's tile intrinsics do not declare which memory they read. This makes earlier stores to *p visible to them.
inline void settle(const void* p) { asm volatile("" ::"r"(p) : "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Configures the tiles for row blocks of `rows0` and `rows1` activations (rows1: 0 if there is one block).
inline void configure(int rows0, int rows1) {
  TileConfig config{.palette = 1, .start_row = 0, .reserved = {}, .row_bytes = {}, .rows = {}};
  const int width[8] = {rows0, rows0, rows1, rows1, kTileRows, kTileRows, rows0, rows1};
  for (int t = 0; t < 8; ++t) {
    if (width[t] == 0) continue;
    config.row_bytes[t] = static_cast<uint16_t>(width[t] * 4);
    config.rows[t] = kTileRows;
  }
  settle(&config);
  _tile_loadconfig(&config);
}

// A tiles of a stripe: the s-th step is at first + s * step, weight rows 16-31 `second` bytes further.
struct Stripe {
  const char* first;
  int64_t row_stride, step, second;
};

// B tiles of a block of `rows` activations, one step after another.
struct RowBlock {
  const char* data;
  int rows;

  const char* at(int64_t step) const { return data + step * kStepBytes * rows; }
  int64_t stride() const { return rows * 4; }
};

// Memory that is fetched while tiles are multiplied, `lines` cache lines at each step, from `next` on: 32 weight rows
// that are read side by side are too many streams for a core to fetch early by itself.
struct FetchAhead {
  const char* next;
  int lines;

  void step() {
    for (int i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// C += the next `steps` A tiles times B tiles. INTEGER: int8 times int8 to int32, otherwise bf16 times bf16 to fp32.
template <bool INTEGER, bool TWO_BLOCKS>
void multiply_tiles(const Stripe& w, const RowBlock& x0, const RowBlock& x1, int64_t step, int steps,
                    FetchAhead& prefetch) {
  const char *a = w.first, *b0 = x0.at(step), *b1 = x1.at(step);
  const int64_t stride0 = x0.stride(), stride1 = x1.stride();
  for (int s = 0; s < steps; ++s, a += w.step, b0 += kTileRows * stride0, b1 += kTileRows * stride1) {
    prefetch.step();
    _tile_loadd(6, b0, stride0);
    _tile_loadd(4, a, w.row_stride);
    if constexpr (INTEGER) {
      _tile_dpbssd(0, 4, 6);
    } else {
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_loadd(5, a + w.second, w.row_stride);
    if constexpr (INTEGER) {
      _tile_dpbssd(1, 5, 6);
    } else {
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (TWO_BLOCKS) {
      _tile_loadd(7, b1, stride1);
      if constexpr (INTEGER) {
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
      } else {
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
}

inline void zero_sums(bool two_blocks) {
  _tile_zero(0);
  _tile_zero(1);
  if (!two_blocks) return;
  _tile_zero(2);
  _tile_zero(3);
}

// sums: 32-bit [weight row][kMaxRows], from the first weight row and row of x on.
inline void load_sums(const float* sums, bool two_blocks) {
  constexpr int64_t kStride = kMaxRows * sizeof(float);
  settle(sums);
  _tile_loadd(0, sums, kStride);
  _tile_loadd(1, sums + kTileRows * kMaxRows, kStride);
  if (!two_blocks) return;
  _tile_loadd(2, sums + kTileRows, kStride);
  _tile_loadd(3, sums + kTileRows * kMaxRows + kTileRows, kStride);
}

inline void store_sums(float* sums, bool two_blocks) {
  constexpr int64_t kStride = kMaxRows * sizeof(float);
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kTileRows * kMaxRows, kStride);
  if (!two_blocks) return;
  _tile_stored(2, sums + kTileRows, kStride);
  _tile_stored(3, sums + kTileRows * kMaxRows + kTileRows, kStride);
}

}  // namespace
}  // namespace eprt
