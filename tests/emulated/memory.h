// In place of the functions of common.cuh and waits.cuh that are written in PTX. Included inside namespace eprt.
template <class T>
T load_word(const T* p, std::memory_order order) {
  emulated::give_way();  // who polls lets others go on
  return std::atomic_ref<T>(*const_cast<T*>(p)).load(order);
}
template <class T>
void store_word(T* p, T v, std::memory_order order) {
  {
    emulated::Unwatched here;
    emulated::block->moved = true;
    if (emulated::block->fibers[emulated::block->current].fenced) order = std::memory_order_release;
  }
  std::atomic_ref<T>(*p).store(v, order);
}
inline void copy_16(void* to, const void* from, bool wanted) {
  if (wanted) return void(std::memcpy(to, from, 16));
  std::memset(to, 0, 16);
}
inline void arrive_when_copied(uint64_t* barrier);  // latents.h
inline Vec16 load_streaming(const void* p) { return *static_cast<const Vec16*>(p); }
inline Vec16 load_peer_written(const void* p) { return *static_cast<const Vec16*>(p); }
template <bool kPeerWritten>
inline void load_if(Vec16& v, const void* p) {
  if (p) v = *static_cast<const Vec16*>(p);
}
inline void store(void* p, const Vec16& v) { *static_cast<Vec16*>(p) = v; }
// A line is written and read as a whole: the epoch last and first, with what orders the other lanes' bytes around it.
inline void store_line(uint8_t* p, const Vec16& v) {
  const bool ends = threadIdx.x % 8 == 7;
  if (p) std::memcpy(p, &v, ends ? 12 : 16);
  __syncwarp();
  if (p && ends) store_word(reinterpret_cast<uint32_t*>(p) + 3, v.w[3], std::memory_order_release);
}
inline void load_line(Vec16& v, const uint8_t* p, uint32_t epoch) {
  const bool ends = threadIdx.x % 8 == 7;
  if (p && ends) v.w[3] = load_word(reinterpret_cast<const uint32_t*>(p) + 3, std::memory_order_acquire);
  __syncwarp();
  if (__shfl_sync(~0u, v.w[3], threadIdx.x | 7) == epoch && p) std::memcpy(&v, p, ends ? 12 : 16);
}
inline uint32_t load_acquire_sys(const uint32_t* p) { return load_word(p, std::memory_order_acquire); }
inline void store_release_sys(uint32_t* p, uint32_t v) { store_word(p, v, std::memory_order_release); }
inline uint32_t load_relaxed(const uint32_t* p) { return load_word(p, std::memory_order_relaxed); }
inline uint64_t load_relaxed(const uint64_t* p) { return load_word(p, std::memory_order_relaxed); }
inline void store_relaxed(uint32_t* p, uint32_t v) { store_word(p, v, std::memory_order_relaxed); }
inline void store_relaxed(uint64_t* p, uint64_t v) { store_word(p, v, std::memory_order_relaxed); }
inline void store_relaxed(uint64_t* p, uint64_t v, uint64_t w) { store_relaxed(p, v), store_relaxed(p + 1, w); }
inline uint64_t fetch_add(uint64_t* p, uint64_t v) { return atomicAdd(p, v); }
inline uint64_t compare_and_swap_acq_rel(uint64_t* p, uint64_t expected, uint64_t v) {
  std::atomic_ref<uint64_t>(*p).compare_exchange_strong(expected, v, std::memory_order_acq_rel);
  return expected;
}
inline int32_t fetch_add_acq_rel(int32_t* p, int32_t v) {
  return std::atomic_ref<int32_t>(*p).fetch_add(v, std::memory_order_acq_rel);
}
inline void barrier_sync(int id, int threads) { emulated::meet(id, threads, true); }
inline void barrier_arrive(int id, int threads) { emulated::meet(id, threads, false); }
inline uint64_t global_timer_ns() {
  emulated::give_way();
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()) * emulated_clock_rate;
}
inline uint32_t pack_bf16(float lo, float hi) {
  const auto bits = [](float v) {
    uint32_t word = __float_as_uint(v);
    if (v != v) return 0x7fffu;
    return (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  };
  return bits(lo) | bits(hi) << 16;
}
inline void await_preceding_kernel() {}
inline void start_following_kernel() {}
inline float from_e4m3(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 127) == 127) return NAN;
  const float x = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return byte & 128 ? -x : x;
}
inline void unpack_fp8(uint32_t word, float (&x)[4]) {
  for (int i = 0; i < 4; ++i) x[i] = from_e4m3(word >> 8 * i);
}
inline void add_to_total(uint64_t* total, uint64_t n) { atomicAdd(total, n); }
inline void add_to_total(int32_t* total, int32_t n) { atomicAdd(total, n); }
inline void raise_total(uint64_t* total, uint64_t n) { atomicMax(total, n); }

// An mbarrier: its phase, how many arrive in each, how many are still to come.
struct Arrivals {
  uint32_t phase;
  uint16_t count, left;
};
inline void barrier_init(uint64_t* barrier, uint32_t count) {
  *reinterpret_cast<Arrivals*>(barrier) = {0, uint16_t(count), uint16_t(count)};
}
inline void barrier_arrive(uint64_t* barrier) {
  emulated::Unwatched here;
  emulated::ordered_before(barrier);
  Arrivals& a = *reinterpret_cast<Arrivals*>(barrier);
  if (--a.left == 0) ++a.phase, a.left = a.count;
  emulated::block->moved = true;
}
inline bool barrier_ended(uint64_t* barrier, uint32_t parity) {
  emulated::give_way();
  emulated::Unwatched here;
  const bool ended = (reinterpret_cast<Arrivals*>(barrier)->phase & 1) != parity;
  if (ended) emulated::ordered_after(barrier);
  return ended;
}

// Of the pairs of bytes in two words.
inline uint32_t first_bytes(uint32_t a, uint32_t b) {
  return (a & 0xff) | (a >> 16 & 0xff) << 8 | (b & 0xff) << 16 | (b >> 16 & 0xff) << 24;
}
inline uint32_t second_bytes(uint32_t a, uint32_t b) { return first_bytes(a >> 8, b >> 8); }
