// The tile instructions of gemm_amx.cpp in plain C++, to test its logic on a CPU without AMX (option EPRT_EMULATE_AMX).
// Rounds like the instructions, except for subnormals.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace eprt {
namespace {

struct EmulatedTile {
  int rows = 0, row_bytes = 0;
  char data[16][64];
};
thread_local EmulatedTile t_tile[8];

inline void emulated_config(const void* config) {
  const auto* bytes = static_cast<const unsigned char*>(config);
  for (int t = 0; t < 8; ++t) {
    t_tile[t].rows = bytes[48 + t];
    t_tile[t].row_bytes = bytes[16 + 2 * t] + 256 * bytes[17 + 2 * t];
    std::memset(t_tile[t].data, 0, sizeof(t_tile[t].data));
  }
}
inline void emulated_zero(int t) { std::memset(t_tile[t].data, 0, sizeof(t_tile[t].data)); }
inline void emulated_load(int t, const void* base, int64_t stride) {
  emulated_zero(t);
  for (int r = 0; r < t_tile[t].rows; ++r) {
    std::memcpy(t_tile[t].data[r], static_cast<const char*>(base) + r * stride, t_tile[t].row_bytes);
  }
}
inline void emulated_store(int t, void* base, int64_t stride) {
  for (int r = 0; r < t_tile[t].rows; ++r) {
    std::memcpy(static_cast<char*>(base) + r * stride, t_tile[t].data[r], t_tile[t].row_bytes);
  }
}
inline float emulated_bf16(const char* p) {
  const uint32_t bits = static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(p)) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void emulated_multiply(int c, int a, int b) {
  for (int row = 0; row < t_tile[c].rows; ++row) {
    for (int col = 0; col < t_tile[c].row_bytes / 4; ++col) {
      float even = 0, odd = 0;
      for (int k = 0; k < t_tile[a].row_bytes / 4; ++k) {
        const char *w = t_tile[a].data[row] + 4 * k, *x = t_tile[b].data[k] + 4 * col;
        even = std::fma(emulated_bf16(w), emulated_bf16(x), even);
        odd = std::fma(emulated_bf16(w + 2), emulated_bf16(x + 2), odd);
      }
      float sum;
      std::memcpy(&sum, t_tile[c].data[row] + 4 * col, 4);
      sum += even + odd;
      std::memcpy(t_tile[c].data[row] + 4 * col, &sum, 4);
    }
  }
}

inline void emulated_multiply_int8(int c, int a, int b) {
  for (int row = 0; row < t_tile[c].rows; ++row) {
    for (int col = 0; col < t_tile[c].row_bytes / 4; ++col) {
      int32_t sum;
      std::memcpy(&sum, t_tile[c].data[row] + 4 * col, 4);
      for (int k = 0; k < t_tile[a].row_bytes; ++k) {
        const auto w = static_cast<int8_t>(t_tile[a].data[row][k]);
        sum += w * static_cast<int8_t>(t_tile[b].data[k / 4][4 * col + k % 4]);
      }
      std::memcpy(t_tile[c].data[row] + 4 * col, &sum, 4);
    }
  }
}

}  // namespace
}  // namespace eprt

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(config) emulated_config(config)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(t) emulated_zero(t)
#define _tile_loadd(t, base, stride) emulated_load(t, base, stride)
#define _tile_stored(t, base, stride) emulated_store(t, base, stride)
#define _tile_dpbf16ps(c, a, b) emulated_multiply(c, a, b)
#define _tile_dpbssd(c, a, b) emulated_multiply_int8(c, a, b)
