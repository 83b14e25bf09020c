// In place of what prompt_attention.cu has in PTX: bulk copies of boxes, tensor cores. Included inside namespace eprt.
//
// Copies happen at once, so that a slot that is filled too early shows. Products are computed when the warpgroup waits
// for them, so that operands that are handed back or changed too early show.
inline void publish_barriers() {}
inline void give_registers() {}
inline void take_registers() {}

inline thread_local std::map<uint64_t*, int> missing;  // bytes that a barrier's phase still waits for

inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  Arrivals& a = *reinterpret_cast<Arrivals*>(barrier);
  if (a.left != 1 || missing[barrier] != 0) std::abort();
  missing[barrier] = int(bytes);
}
inline void arrive_bytes(uint64_t* barrier, int bytes) {
  if ((missing[barrier] -= bytes) < 0) std::abort();
  if (missing[barrier] == 0) barrier_arrive(barrier);
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!barrier_ended(barrier, parity)) {
  }
}

// A tensor map here: address, rows, bytes from row to row, tiles of 128 bytes, tiles of a box. Its boxes have 128 rows.
inline void copy_rows(void* to, const TensorMap* map, int row, int known, int tile, uint64_t* barrier) {
  const auto* from = reinterpret_cast<const unsigned char*>(map->word[0]);
  const int64_t rows = map->word[1], row_bytes = map->word[2];
  const int tiles = map->word[3], box_tiles = map->word[4];
  if (reinterpret_cast<uintptr_t>(to) % 1024 || row < 0 || known < 0) std::abort();
  for (int t = 0; t < box_tiles; ++t)
    for (int r = 0; r < 128; ++r)
      for (int b = 0; b < 128; b += 16) {
        unsigned char* at = static_cast<unsigned char*>(to) + t * 128 * 128 + r * 128 + (b ^ r % 8 * 16);
        const bool inside = r < known && row + r < rows && tile + t < tiles;
        if (inside)
          std::memcpy(at, from + (row + r) * row_bytes + (tile + t) * 128 + b, 16);
        else
          std::memset(at, 0, 16);
      }
  arrive_bytes(barrier, box_tiles * 128 * 128);
}
inline void load_tiles(void* to, const TensorMap* map, int row, int tile, uint64_t* barrier) {
  copy_rows(to, map, row, 128, tile, barrier);
}
inline void load_known_rows(void* to, const TensorMap* map, int row, int known, int tile, uint64_t* barrier) {
  copy_rows(to, map, row, known, tile, barrier);
}

// ---- tensor cores: each thread computes the sums that it holds

struct Product {
  float* d;
  const uint32_t* registers;  // null: x is in shared memory
  uint64_t x, y;
  bool add;
};
inline thread_local std::map<unsigned, std::vector<std::vector<Product>>> pending;  // of each thread, by group

// The value at so many bytes behind a descriptor's address, before the swizzle.
inline float shared_value(uint64_t descriptor, int offset) {
  const uintptr_t memory = reinterpret_cast<uintptr_t>(emulated::shared_memory()), base = (memory + 1023) & ~1023ull;
  const uintptr_t linear = base + (((descriptor & 0x3fff) * 16 - base) & 0x3ffff) + offset;
  return bf16_lo(*reinterpret_cast<const uint16_t*>(linear ^ (linear >> 7 & 7) << 4));
}
inline void check_descriptor(uint64_t descriptor, uint64_t tile_bytes) {
  if (descriptor >> 16 != (tile_bytes | uint64_t(64) << 16 | uint64_t(1) << 46)) std::abort();
}
inline void left_operand(const Product& p, int warp, int lane, float (&x)[2][16]) {
  if (!p.registers) check_descriptor(p.x, 1);
  for (int k = 0; k < 16; ++k)
    for (int h = 0; h < 2; ++h)
      if (!p.registers) x[h][k] = shared_value(p.x, (16 * warp + lane / 4 + 8 * h) * 128 + 2 * k);
  for (int i = 0; p.registers && i < 4; ++i) {
    const auto* all = emulated::exchange(p.registers[i]);
    for (int from = 0; from < 4; ++from) {
      const uint32_t word = all[lane / 4 * 4 + from];
      x[i % 2][i / 2 * 8 + 2 * from] = bf16_lo(word), x[i % 2][i / 2 * 8 + 2 * from + 1] = bf16_hi(word);
    }
    emulated::exchange(0);
  }
}
inline void compute(const Product& p) {
  const int thread = emulated::block->current % 128, lane = thread % 32;
  float x[2][16];
  left_operand(p, thread / 32, lane, x);
  check_descriptor(p.y, p.registers ? 128 * 128 / 16 : 1);
  for (int i = 0; i < 64; i += i % 2 ? 3 : 1) {  // columns; both rows of each
    const int column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    if (!p.add) p.d[i] = p.d[i + 2] = 0.f;
    for (int k = 0; k < 16; ++k) {
      const int at = p.registers ? column / 64 * 128 * 128 + k * 128 + column % 64 * 2 : column * 128 + 2 * k;
      const float y = shared_value(p.y, at);
      p.d[i] += x[0][k] * y, p.d[i + 2] += x[1][k] * y;
    }
  }
}
inline void multiply_bf16(float (&d)[64], uint64_t x, uint64_t y, bool add) {
  pending[emulated::block->current].back().push_back({d, nullptr, x, y, add});
}
inline void add_product(float (&d)[64], const uint32_t* x, uint64_t y) {
  pending[emulated::block->current].back().push_back({d, x, 0, y, true});
}
inline void multiply_fence() {
  auto& groups = pending[emulated::block->current];
  if (groups.empty()) groups.emplace_back();
}
inline void multiply_commit() { pending[emulated::block->current].emplace_back(); }
template <int N>
inline void multiply_wait_all_but() {
  auto& groups = pending[emulated::block->current];
  while (groups.size() > N + 1) {
    for (const Product& product : groups.front()) compute(product);
    groups.erase(groups.begin());
  }
  __syncwarp();  // the instruction is the warp's
}
inline void multiply_wait() { multiply_wait_all_but<0>(); }
template <int N>
inline void hold(float (&)[N]) {}
inline float exp2_fast(float x) { return std::exp2(x); }
