// A CUDA kernel as a C++ function, slowly: what csrc/cuda needs of the device, for x86-64 and GCC.
//
// A thread block is a thread of the operating system; its CUDA threads are fibers that take turns there, and give way
// wherever they wait. So blocks (of all ranks) run truly side by side, and the threads of a warp never in lockstep:
// what relies on that hangs or fails. They only leave together what is not inlined. Memory is as strong as the CPU's: a
// missing release does not show, but to ThreadSanitizer (order.h).
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "order.h"

extern "C" inline uint64_t emulated_clock_rate = 1;  // how much faster than the host's the GPU's clock runs

namespace emulated {

struct Warp {  // one exchange of values among its lanes after another; the slots of the one before may still be read
  unsigned generation = 0;
  int arrived = 0;
  uint64_t slot[2][32];
  int inside = 0;                        // lanes in a function that is not inlined
  unsigned left = 0;                     // how often all that were inside have left it
  std::map<const void*, unsigned> seen;  // how many phases of barriers have ended for it
};

struct Barrier {
  unsigned generation = 0;
  int arrived = 0;
};

struct Fiber {
  void* stack_pointer;
  std::unique_ptr<char[]> stack;
  bool done = false, begun = false;
  bool fenced = false;                   // its relaxed stores come after all that it has seen
  void* watched;                         // by ThreadSanitizer, as a thread
  std::map<const void*, unsigned> seen;  // as of its warp
};

struct Dim {
  unsigned x;
};

struct Block {
  Dim index, blocks;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::vector<char> shared;
  void* scheduler;  // its stack pointer while a fiber runs
  void* watched;    // likewise
  unsigned current;
  void (*body)(void*);
  void* argument;
  bool moved;  // since the scheduler last looked
};

inline thread_local Block* block;
inline thread_local Dim thread_index;

// Saves what a call must preserve on this stack, goes on with the other.
asm(R"(
.text
.type emulated_switch,@function
emulated_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
extern "C" void emulated_switch(void** save, void* next);

inline void give_way() {
  Unwatched here;
  Fiber& self = block->fibers[block->current];
  watch(block->watched, false);
  emulated_switch(&self.stack_pointer, block->scheduler);
}

inline void fiber_main() {
  block->body(block->argument);
  Fiber* self;
  {
    Unwatched here;
    self = &block->fibers[block->current];
    self->done = true;
  }
  watch(block->watched, true);
  emulated_switch(&self->stack_pointer, block->scheduler);
}

inline void prepare(Fiber& fiber) {
  constexpr size_t kStack = 128 << 10;
  fiber.stack.reset(new char[kStack]);
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStack) & ~uintptr_t(15);
  void** frame = reinterpret_cast<void**>(top) - 8;  // six registers, where to return, alignment as after a call
  std::fill(frame, frame + 8, nullptr);
  frame[6] = reinterpret_cast<void*>(&fiber_main);
  fiber.stack_pointer = frame;
  fiber.watched = watch_another();
}

inline void run_block(unsigned index, unsigned blocks, int threads, int shared_bytes, void (*body)(void*),
                      void* argument) {
  Block self{};
  self.index = {index}, self.blocks = {blocks}, self.body = body, self.argument = argument;
  self.fibers.resize(threads), self.warps.resize(threads / 32);
  self.shared.assign(shared_bytes + 128, char(0x5a));
  Unwatched here;
  block = &self;
  self.watched = watched_thread();
  for (Fiber& fiber : self.fibers) prepare(fiber);
  // Every round in another order, other ones in every launch: from anywhere, in steps of a number that has no factor in
  // common with `threads`.
  static std::atomic<uint32_t> launched;
  uint32_t random = 2654435761u * ++launched;
  for (int left = threads; left;) {
    self.moved = false;
    left = 0;
    random = random * 1664525u + 1013904223u;
    constexpr unsigned kSteps[] = {1, 3, 7, 13, 37, 101, 211};
    unsigned step = kSteps[(random >> 16) % 7];
    if (std::gcd(step, unsigned(threads)) != 1) step = 1;
    self.current = (random >> 8) % threads;
    for (int turn = 0; turn < threads; ++turn) {
      self.current = (self.current + step) % threads;
      Fiber& fiber = self.fibers[self.current];
      if (fiber.done) continue;
      thread_index = {self.current};
      watch(fiber.watched, !fiber.begun);
      fiber.begun = true;
      emulated_switch(&self.scheduler, fiber.stack_pointer);
      left += !fiber.done;
    }
    if (!self.moved) std::this_thread::yield();  // all wait for others
  }
  for (Fiber& fiber : self.fibers) stop_watching(fiber.watched);
}

// ---- waiting inside a block

inline Warp& warp() { return block->warps[block->current / 32]; }

inline const uint64_t* exchange(uint64_t value) {  // what each lane gave
  Unwatched here;
  Warp& w = warp();
  const unsigned generation = w.generation;
  uint64_t* slot = w.slot[generation & 1];
  slot[block->current % 32] = value;
  if (++w.arrived == 32) {
    w.arrived = 0, ++w.generation, block->moved = true;
  } else {
    while (w.generation == generation) give_way();
  }
  return slot;
}

// Lives in a function that is not inlined: the compiler brings a warp's lanes together where they leave it, so that
// none goes on while another is still inside.
struct LeaveTogether {
  LeaveTogether() {
    Unwatched here;
    ++warp().inside;
  }
  ~LeaveTogether() {
    Unwatched here;
    Warp& w = warp();
    const unsigned left = w.left;
    if (--w.inside == 0) {
      ++w.left, block->moved = true;
    } else {
      while (w.left == left) give_way();  // not for `inside`: who has left may be inside again by now
    }
  }
};

inline void meet(int id, int threads, bool waits) {
  Unwatched here;
  Barrier& b = block->barriers[id];
  const unsigned generation = b.generation;
  ordered_before(&b.arrived);
  if (++b.arrived == threads) {
    b.arrived = 0, ++b.generation, block->moved = true;
    if (waits) ordered_after(&b.arrived);
    return;
  }
  while (waits && b.generation == generation) give_way();
  if (waits) ordered_after(&b.arrived);
}

inline unsigned char* shared_memory() {
  return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(block->shared.data()) + 127) & ~uintptr_t(127));
}

template <class T>
uint64_t bits(T v) {
  uint64_t word = 0;
  std::memcpy(&word, &v, sizeof v);
  return word;
}

template <class T>
T value(uint64_t word) {
  T v;
  std::memcpy(&v, &word, sizeof v);
  return v;
}

}  // namespace emulated

using std::max;
using std::min;

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __noinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static thread_local
#define __align__(n) alignas(n)
#define threadIdx emulated::thread_index
#define blockIdx emulated::block->index
#define gridDim emulated::block->blocks

inline void __syncthreads() { emulated::meet(0, int(emulated::block->fibers.size()), true); }
inline void __syncwarp() {
  emulated::ordered_before(&emulated::warp().generation);
  emulated::exchange(0);
  emulated::ordered_after(&emulated::warp().generation);
}
inline void __nanosleep(unsigned) { emulated::give_way(); }
inline void __threadfence_system() {
  emulated::Unwatched here;
  emulated::block->fibers[emulated::block->current].fenced = true;
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

template <class T>
T __shfl_sync(unsigned, T v, int lane) {
  emulated::Unwatched here;
  return emulated::value<T>(emulated::exchange(emulated::bits(v))[lane & 31]);
}
template <class T>
T __shfl_up_sync(unsigned, T v, int by) {
  emulated::Unwatched here;
  const int lane = emulated::block->current % 32;
  return emulated::value<T>(emulated::exchange(emulated::bits(v))[lane < by ? lane : lane - by]);
}
template <class T>
T __shfl_down_sync(unsigned, T v, int by) {
  emulated::Unwatched here;
  const int lane = emulated::block->current % 32;
  return emulated::value<T>(emulated::exchange(emulated::bits(v))[lane + by > 31 ? lane : lane + by]);
}
template <class T>
T __shfl_xor_sync(unsigned, T v, int with) {
  emulated::Unwatched here;
  return emulated::value<T>(emulated::exchange(emulated::bits(v))[(emulated::block->current % 32) ^ with]);
}
inline unsigned __ballot_sync(unsigned, bool v) {
  emulated::Unwatched here;
  const uint64_t* all = emulated::exchange(v);
  unsigned set = 0;
  for (int i = 0; i < 32; ++i) set |= unsigned(all[i] != 0) << i;
  return set;
}
inline bool __all_sync(unsigned mask, bool v) { return __ballot_sync(mask, v) == ~0u; }
inline bool __any_sync(unsigned mask, bool v) { return __ballot_sync(mask, v) != 0; }
template <class T, class Combine>
T reduce(T v, Combine combine) {
  emulated::Unwatched here;
  const uint64_t* all = emulated::exchange(emulated::bits(v));
  T result = emulated::value<T>(all[0]);
  for (int i = 1; i < 32; ++i) result = combine(result, emulated::value<T>(all[i]));
  return result;
}
inline int __reduce_add_sync(unsigned, int v) {
  return reduce(v, [](int a, int b) { return a + b; });
}
inline int __reduce_max_sync(unsigned, int v) {
  return reduce(v, [](int a, int b) { return max(a, b); });
}
inline unsigned __reduce_or_sync(unsigned, unsigned v) {
  return reduce(v, [](unsigned a, unsigned b) { return a | b; });
}

inline unsigned __match_any_sync(unsigned, int v) {
  emulated::Unwatched here;
  const uint64_t* all = emulated::exchange(emulated::bits(v));
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) same |= unsigned(all[i] == emulated::bits(v)) << i;
  return same;
}

inline int __ffs(unsigned v) { return __builtin_ffs(int(v)); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline unsigned __vcmpeq2(unsigned a, unsigned b) {
  return ((a ^ b) & 0xffffu ? 0u : 0xffffu) | ((a ^ b) >> 16 ? 0u : 0xffff0000u);
}
inline float __uint_as_float(unsigned v) { return emulated::value<float>(v); }
inline unsigned __float_as_uint(float v) { return unsigned(emulated::bits(v)); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __log2f(float v) { return std::log2(v); }
inline int __float2int_rn(float v) { return int(std::lrintf(v)); }

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
inline uint64_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<uintptr_t>(p); }
template <class T>
T atomicAdd(T* p, T v) {
  return std::atomic_ref<T>(*p).fetch_add(v, std::memory_order_relaxed);
}
inline unsigned atomicOr(unsigned* p, unsigned v) {
  return std::atomic_ref<unsigned>(*p).fetch_or(v, std::memory_order_relaxed);
}
template <class T>
T atomicMax(T* p, T v) {
  T old = std::atomic_ref<T>(*p).load(std::memory_order_relaxed);
  while (old < v && !std::atomic_ref<T>(*p).compare_exchange_weak(old, v, std::memory_order_relaxed)) {
  }
  return old;
}
template <class T>
T atomicCAS(T* p, T expected, T v) {
  std::atomic_ref<T>(*p).compare_exchange_strong(expected, v, std::memory_order_relaxed);
  return expected;
}
