// In place of what kernels over fp8 caches of latents have in PTX, beside tensor.h: boxes of several tiles, products
// of e4m3. Included inside namespace eprt.
#include "tensor.h"

struct float2 {
  float x, y;
};
inline void registers_for_loads() {}
inline void registers_for_products() {}
inline void registers_for_scores() {}
inline void registers_for_values() {}
template <int N>
inline void keep(const uint32_t (&)[N][4]) {}
inline void pin(float&) {}
inline void cluster_barrier() { sync_cluster(); }
inline void arrive_when_copied(uint64_t* barrier) { arrive_with_bytes(barrier, 1, 0); }
inline float exp2_fast(float x) { return std::exp2(x); }
template <int N>
inline void hold(float (&)[N]) {}

// A tensor map here: address, rows, bytes from a row to the next, rows of a box, tiles of a box, bytes of a tile's row
// (128: swizzled).
inline void copy_tiles(unsigned char* to, const TensorMap& map, int row, int tile) {
  const auto* from = reinterpret_cast<const unsigned char*>(map.word[0]);
  const int64_t rows = map.word[1], stride = map.word[2], box_rows = map.word[3], tiles = map.word[4];
  const int width = int(map.word[5]);
  if (reinterpret_cast<uintptr_t>(to) % 128) std::abort();
  for (int t = 0; t < tiles; ++t)
    for (int r = 0; r < box_rows; ++r)
      for (int b = 0; b < width; ++b) {
        const bool inside = row + r < rows && (tile + t + 1) * int64_t(width) <= stride;
        unsigned char* at = to + (t * box_rows + r) * width + b;
        if (width == 128) at = reinterpret_cast<unsigned char*>(uintptr_t(at) ^ (uintptr_t(at) >> 7 & 7) << 4);
        *at = inside ? from[(row + r) * stride + (tile + t) * width + b] : 0;
      }
}
inline int box_bytes(const TensorMap& map) { return int(map.word[3] * map.word[4] * map.word[5]); }
inline void load_tiles(void* to, const TensorMap* map, int row, int tile, uint64_t* barrier) {
  copy_tiles(static_cast<unsigned char*>(to), *map, row, tile);
  arrive_with_bytes(barrier, 0, -box_bytes(*map));
}
inline void load_tiles_for_all(void* to, const TensorMap* map, int row, int tile, uint64_t* barrier) {
  for (int rank = 0; rank < CTAS; ++rank) {
    copy_tiles(CTAS > 1 ? at_rank(rank, to) : static_cast<unsigned char*>(to), *map, row, tile);
    auto* there = CTAS > 1 ? reinterpret_cast<uint64_t*>(at_rank(rank, barrier)) : barrier;
    arrive_with_bytes(there, 0, -box_bytes(*map));
  }
}
inline void barrier_arrive_at(uint64_t* barrier, int rank) {
  if (CTAS > 1) return arrive_at(rank, barrier);
  arrive_with_bytes(barrier, 1, 0);
}

inline uint8_t e4m3_at(uint64_t descriptor, int row, int column) { return *operand_byte(descriptor, row, column); }

// The sums of a product of 64 columns that this thread holds.
template <class Multiply>
inline void add_sums(float* d, Multiply multiply) {
  const int thread = emulated::block->current % 128, warp = thread / 32, lane = thread % 32;
  for (int i = 0; i < 32; ++i)
    d[i] += multiply(16 * warp + lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + 2 * (lane % 4) + i % 2);
}
inline void start(Work work) { pending[emulated::block->current].back().push_back(std::move(work)); }
template <int kColumns>
inline void multiply(float (&d)[kColumns / 2], uint64_t w, uint64_t x, bool add) {
  start([=, &d] {
    if (!add) std::fill(d, d + 32, 0.f);
    add_sums(d, [&](int row, int column) {
      float sum = 0.f;
      for (int k = 0; k < 32; ++k) sum += from_e4m3(e4m3_at(w, row, k)) * from_e4m3(e4m3_at(x, column, k));
      return sum;
    });
  });
}
inline void multiply_bf16(float (&d)[32], uint64_t x, uint64_t y, bool add) {
  start([=, &d] {
    if (!add) std::fill(d, d + 32, 0.f);
    add_sums(d, [&](int row, int column) {
      float sum = 0.f;
      for (int k = 0; k < 16; ++k) sum += operand_at(x, row, k) * operand_at(y, column, k);
      return sum;
    });
  });
}
// The left operand's rows lie in the registers of four lanes each.
inline void add_product_fp8(float (&d)[32], const uint32_t (&x)[4], uint64_t y) {
  start([=, &d, &x] {
    uint8_t row[2][32];
    for (int i = 0; i < 4; ++i) {
      const auto* all = emulated::exchange(x[i]);
      const int first = emulated::block->current % 32 & ~3;
      for (int k = 0; k < 16; ++k) row[i % 2][i / 2 * 16 + k] = uint8_t(all[first + k / 4] >> k % 4 * 8);
    }
    add_sums(d, [&](int r, int column) {
      float sum = 0.f;
      for (int k = 0; k < 32; ++k) sum += from_e4m3(row[r / 8 % 2][k]) * from_e4m3(e4m3_at(y, column, k));
      return sum;
    });
  });
}
inline void load_pairs(uint32_t (&pairs)[4], const uint8_t* my_row) {
  const auto* all = emulated::exchange(reinterpret_cast<uintptr_t>(my_row));
  const int lane = emulated::block->current % 32;
  for (int i = 0; i < 4; ++i) {  // of the four matrices of 8 rows: two rows, two bytes
    pairs[i] = 0;
    for (int k = 0; k < 2; ++k) {
      uint16_t two;
      std::memcpy(&two, reinterpret_cast<const uint8_t*>(all[8 * i + lane % 4 * 2 + k]) + lane / 4 * 2, 2);
      pairs[i] |= uint32_t(two) << 16 * k;
    }
  }
}
inline void load_transposed(uint32_t (&x)[4], const uint8_t* my_row) {
  uint32_t pairs[4];
  load_pairs(pairs, my_row);
  for (int i = 0; i < 4; ++i) x[i] = (i % 2 ? second_bytes : first_bytes)(pairs[i / 2 * 2], pairs[i / 2 * 2 + 1]);
}
