// In place of what index_scores.cu has in PTX, beside tensor.h: bulk copies, products of e4m3 whose left operand lies
// in registers. Included inside namespace eprt.
#include "tensor.h"

struct float2 {
  float x, y;
};
template <int N>
inline void hold(float (&)[N]) {}
template <class T>
inline void keep(const T&) {}

inline void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16) std::abort();
  std::memcpy(to, from, bytes);
  arrive_with_bytes(barrier, 0, -int(bytes));
}
inline void load_box(void* to, const TensorMap* map, int column, int row, uint64_t* barrier) {
  copy_box(static_cast<unsigned char*>(to), *map, column, row);
  arrive_with_bytes(barrier, 0, -int(map->word[3] * 128));
}
// Four lanes have the rows l / 4 and l / 4 + 8 of a warp's.
inline void multiply_fp8(float (&d)[32], const uint32_t (&x)[4], uint64_t y, bool add) {
  pending[emulated::block->current].back().push_back([=, &d, &x] {
    if (!add) std::fill(d, d + 32, 0.f);
    uint8_t row[2][32];
    for (int i = 0; i < 4; ++i) {
      const auto* all = emulated::exchange(x[i]);
      const int first = emulated::block->current % 32 & ~3;
      for (int k = 0; k < 16; ++k) row[i % 2][i / 2 * 16 + k] = uint8_t(all[first + k / 4] >> k % 4 * 8);
    }
    const int lane = emulated::block->current % 32;
    for (int i = 0; i < 32; ++i) {
      const int column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
      for (int k = 0; k < 32; ++k) d[i] += from_e4m3(row[i / 2 % 2][k]) * from_e4m3(*operand_byte(y, column, k));
    }
  });
}
