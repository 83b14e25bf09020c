// In place of what grouped_product.cu has in PTX: clusters of two thread blocks, bulk copies of boxes, tensor cores.
// Included inside namespace eprt.
//
// Copies happen at once, so that a slot that is filled too early shows. Products are computed when the warpgroup waits
// for them, so that a slot that is handed back too early shows.
struct uint2 {
  uint32_t x, y;
};

struct Cluster {
  std::mutex mutex;
  unsigned generation = 0, arrived = 0;
  unsigned char* shared[2];
  std::map<void*, int> bytes;  // that a barrier's phase still waits for
};
inline Cluster clusters[64];
inline Cluster& cluster() { return clusters[emulated::block->index.x / 2]; }
inline int cluster_rank() { return emulated::block->index.x % 2; }

inline unsigned char* aligned_shared() {
  return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(emulated::shared_memory()) + 1023) & ~1023ull);
}
inline unsigned char* at_rank(int rank, const void* mine) {
  return cluster().shared[rank] + (static_cast<const unsigned char*>(mine) - aligned_shared());
}

inline void sync_cluster() {
  Cluster& c = cluster();
  c.mutex.lock();
  c.shared[cluster_rank()] = aligned_shared();
  const unsigned generation = c.generation;
  if (++c.arrived == 2 * emulated::block->fibers.size()) c.arrived = 0, ++c.generation;
  c.mutex.unlock();
  emulated::block->moved = true;
  for (bool waits = true; waits;) {
    emulated::give_way();
    std::lock_guard lock(c.mutex);
    waits = c.generation == generation;
  }
  emulated::block->moved = true;
}

inline void publish_barriers() {}
inline void give_registers() {}
inline void take_registers() {}

// The rest of a phase: arrivals and bytes. The cluster's mutex is held.
inline void end_phase_if_complete(uint64_t* barrier) {
  Arrivals& a = *reinterpret_cast<Arrivals*>(barrier);
  if (a.left == 0 && cluster().bytes[barrier] == 0) ++a.phase, a.left = a.count;
}
inline void arrive_with_bytes(uint64_t* barrier, int arrivals, int bytes) {
  std::lock_guard lock(cluster().mutex);
  Arrivals& a = *reinterpret_cast<Arrivals*>(barrier);
  if (a.left < arrivals) std::abort();
  a.left -= arrivals, cluster().bytes[barrier] += bytes;
  end_phase_if_complete(barrier);
  emulated::block->moved = true;
}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) { arrive_with_bytes(barrier, 1, int(bytes)); }
inline void arrive_at(int rank, uint64_t* barrier) {
  arrive_with_bytes(reinterpret_cast<uint64_t*>(at_rank(rank, barrier)), 1, 0);
}
// A warp's lanes look at a barrier by one instruction: one that comes late sees what the first one saw, though the next
// phase may have ended meanwhile.
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  unsigned& seen_by_warp = emulated::warp().seen[barrier];
  unsigned& seen = emulated::block->fibers[emulated::block->current].seen[barrier];
  for (bool waits = seen == seen_by_warp; waits;) {
    emulated::give_way();
    std::lock_guard lock(cluster().mutex);
    waits = (reinterpret_cast<Arrivals*>(barrier)->phase & 1) == parity && seen == seen_by_warp;
  }
  seen_by_warp = std::max(seen_by_warp, ++seen);
}

// A tensor map here: address, rows, bytes of a row, rows of a box. Its boxes are 128 bytes wide, in the swizzle of 128.
inline void copy_box(unsigned char* to, const TensorMap& map, int column, int row) {
  const auto* from = reinterpret_cast<const unsigned char*>(map.word[0]);
  const int rows = map.word[1], columns = map.word[2], box_rows = map.word[3];
  if (reinterpret_cast<uintptr_t>(to) % 1024) std::abort();
  for (int r = 0; r < box_rows; ++r)
    for (int b = 0; b < 128; ++b) {
      const bool inside = row + r < rows && column + b < columns;
      to[r * 128 + (b ^ r % 8 * 16)] = inside ? from[int64_t(row + r) * columns + column + b] : 0;
    }
}
inline uint64_t keep_longest() { return 0; }
inline uint64_t keep_as_it_is() { return 0; }
inline void load_box(void* to, const TensorMap* map, int column, int row, uint64_t* barrier, uint64_t) {
  copy_box(static_cast<unsigned char*>(to), *map, column, row);
  arrive_with_bytes(barrier, 0, -int(map->word[3] * 128));
}
inline void load_box_for_both(void* to, const TensorMap* map, int column, int row, uint64_t* barrier, uint64_t) {
  for (int rank = 0; rank < 2; ++rank) {
    copy_box(at_rank(rank, to), *map, column, row);
    arrive_with_bytes(reinterpret_cast<uint64_t*>(at_rank(rank, barrier)), 0, -int(map->word[3] * 128));
  }
}

// ---- tensor cores: each thread computes the sums that it holds

struct Product {
  float* d;
  int columns;
  uint64_t w, x;
};
using Work = std::function<void()>;
inline thread_local std::map<unsigned, std::vector<std::vector<Work>>> pending;  // of each thread, by group

// Byte `byte` of a row of an operand.
inline const uint8_t* operand_byte(uint64_t descriptor, int row, int byte) {
  if (descriptor >> 16 != (uint64_t(1) | uint64_t(64) << 16 | uint64_t(1) << 46)) std::abort();
  const uintptr_t base = reinterpret_cast<uintptr_t>(aligned_shared());
  const uintptr_t linear = base + (((descriptor & 0x3fff) * 16 - base) & 0x3ffff) + row * 128 + byte;
  return reinterpret_cast<const uint8_t*>(linear ^ (linear >> 7 & 7) << 4);
}
inline float operand_at(uint64_t descriptor, int row, int column) {
  return bf16_lo(*reinterpret_cast<const uint16_t*>(operand_byte(descriptor, row, 2 * column)));
}
inline void compute(const Product& p) {
  const int thread = emulated::block->current % 128, warp = thread / 32, lane = thread % 32;
  for (int i = 0; i < p.columns / 2; ++i) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 16; ++k) p.d[i] += operand_at(p.w, row, k) * operand_at(p.x, column, k);
  }
}
template <int kColumns>
inline void multiply_bf16(float (&d)[kColumns / 2], uint64_t w, uint64_t x) {
  pending[emulated::block->current].back().push_back([=, &d] { compute({d, kColumns, w, x}); });
}
inline void multiply_fence() {
  auto& groups = pending[emulated::block->current];
  if (groups.empty()) groups.emplace_back();
}
inline void multiply_commit() { pending[emulated::block->current].emplace_back(); }
inline void wait_for_all_but(size_t left) {
  auto& groups = pending[emulated::block->current];
  while (groups.size() > left + 1) {
    for (const Work& product : groups.front()) product();
    groups.erase(groups.begin());
  }
  __syncwarp();  // the instruction is the warp's
}
inline void multiply_wait() { wait_for_all_but(0); }
template <int N>
inline void multiply_wait_all_but() {
  wait_for_all_but(N);
}

// Lane l gives row l / 4, columns 2 (l % 4) and the next, of an 8 x 8 matrix, and gets the same of its transpose.
inline uint32_t transposed(uint32_t pair) {
  const auto* all = emulated::exchange(pair);
  const int lane = emulated::block->current % 32, column = lane / 4, row = 2 * (lane % 4);
  const auto value = [&](int r) { return uint32_t(all[r * 4 + column / 2] >> column % 2 * 16) & 0xffffu; };
  return value(row) | value(row + 1) << 16;
}
inline float silu(float x) { return x / (1.f + std::exp(-x)); }
