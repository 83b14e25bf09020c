// Shared by all kernels: memory operations by scope, waits with a deadline, number formats. Includes no system header,
// so NVRTC compiles a kernel in a fraction of a second without a CUDA toolkit. Builds for sm_80 and newer.
#pragma once

#define EPRT_DEVICE __device__ __forceinline__

namespace eprt {

// NVRTC has no <cstdint>; nvcc (used for its resource report) has a uint64_t that atomics do not accept.
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int32_t = int;
using uint64_t = unsigned long long;
using int64_t = long long;

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct alignas(16) Vec16 {
  uint32_t w[4];
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- memory, by scope -----------------------------------------------------------------------------------------------

EPRT_DEVICE Vec16 load_streaming(const void* p) {  // written before this kernel started, read once
  Vec16 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p));
  return v;
}

// For data that a peer, or a concurrent kernel, may have written during this kernel: bypasses the non-coherent path and
// stale L1 lines.
EPRT_DEVICE Vec16 load_peer_written(const void* p) {
  Vec16 v;
  asm volatile("ld.relaxed.sys.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}

// Loads v from p with one instruction; nothing if p is null. The last argument: what else the instruction touches.
#define EPRT_LOAD_IF_ASM(load, v, p, ...)                                                                \
  asm volatile("{ .reg .pred wanted; setp.ne.u64 wanted, %4, 0; @wanted " load " {%0,%1,%2,%3}, [%4]; }" \
               : "+r"(v.w[0]), "+r"(v.w[1]), "+r"(v.w[2]), "+r"(v.w[3])                                  \
               : "l"(p)                                                                                  \
               : __VA_ARGS__)

// Nothing if p is null. kPeerWritten: as load_peer_written, else as load_streaming.
template <bool kPeerWritten>
EPRT_DEVICE void load_if(Vec16& v, const void* p) {
  if constexpr (kPeerWritten)
    EPRT_LOAD_IF_ASM("ld.relaxed.sys.global.L1::no_allocate.v4.u32", v, p, "memory");
  else
    EPRT_LOAD_IF_ASM("ld.global.nc.L1::no_allocate.v4.u32", v, p);
}

EPRT_DEVICE void store(void* p, const Vec16& v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
               "r"(v.w[3])
               : "memory");
}

EPRT_DEVICE uint32_t load_acquire_sys(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

EPRT_DEVICE void store_release_sys(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

EPRT_DEVICE uint32_t load_relaxed(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

EPRT_DEVICE uint64_t load_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

EPRT_DEVICE void store_relaxed(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

EPRT_DEVICE void store_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Two words, each of which is seen whole; p is a multiple of 16.
EPRT_DEVICE void store_relaxed(uint64_t* p, uint64_t v, uint64_t w) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(p), "l"(v), "l"(w) : "memory");
}

EPRT_DEVICE uint64_t fetch_add(uint64_t* p, uint64_t v) {
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

EPRT_DEVICE int32_t fetch_add_acq_rel(int32_t* p, int32_t v) {
  int32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// A barrier among `threads` threads of the block; ids from 1 (0 is __syncthreads). arrive: counts without waiting.
EPRT_DEVICE void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

EPRT_DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

EPRT_DEVICE uint64_t global_timer_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}

// ---- waiting --------------------------------------------------------------------------------------------------------

// What the first wait that times out leaves in host memory; eprt/ep/nvlink/failure.py reads it.
struct Failure {
  uint32_t code;  // a FailureCode, or 0: none. Written last.
  uint32_t peer;  // rank; kSignal: tile; kBadSlot: upper half of the value; kSlotFull: local slot
  uint32_t seen;
  uint32_t expected;  // kBadSlot: position token * K + k; kSlotFull: rows that the slot has room for
};

enum FailureCode : uint32_t {
  kDispatchCounts = 1,
  kDispatchTokens = 2,
  kCombineRows = 3,
  kSignal = 4,
  kBadSlot = 5,
  kDispatchPlace = 6,  // where a peer wants its rows
  kCombinePlace = 7,
  kOverflow = 8,  // peer: the rank whose rows do not fit; seen: rows; expected: room
  kSlotFull = 9,
  kCombineWeights = 10,
  kMeeting = 11,  // meeting.cu
};

EPRT_DEVICE void report(Failure* failure, uint32_t code, uint32_t peer, uint32_t seen, uint32_t expected) {
  if (load_relaxed(&failure->code)) return;  // keep the first failure: later ones may be its consequences
  store_relaxed(&failure->peer, peer);
  store_relaxed(&failure->seen, seen);
  store_relaxed(&failure->expected, expected);
  __threadfence_system();
  store_relaxed(&failure->code, code);
}

// The epoch of a call that follows `calls` others of its kind: 1, 2, ..., and 1 again when 32 bits overflow. Never 0,
// the content of memory that was never written. The period is a multiple of `sets`, so that fields that exist `sets`
// times are still used in turn.
EPRT_DEVICE uint32_t epoch_after(uint64_t calls, uint32_t sets) {
  if (calls < (1ull << 32) - (1u << 16)) return uint32_t(calls) + 1;  // for weeks: no division
  const uint32_t period = 0xffffffffu / sets * sets;
  while (calls >= period) calls -= period;  // one more pass every few weeks; a 64-bit division is 2 KB of code
  return uint32_t(calls) + 1;
}

constexpr uint64_t kTicketsPerCall = 1024;  // more than the thread blocks of any launch

// The epoch of this call. Called by one thread of every block of a sending launch: a captured kernel has no host
// argument that could count calls, so the blocks count. Each adds 1, block 0 the rest of kTicketsPerCall. kind: index
// in c.ticket.
template <class Context>
EPRT_DEVICE uint32_t take_ticket(const Context& c, int kind) {
  const uint64_t tickets = blockIdx.x == 0 ? kTicketsPerCall - (gridDim.x - 1) : 1;
  return epoch_after(fetch_add(c.ticket + kind, tickets) / kTicketsPerCall, 2 * c.num_buffers);
}

struct Deadline {
  uint64_t timeout_ns;
  uint32_t* mask;  // [R]: 1 for a masked rank, which nobody waits for
  uint32_t* told;  // [R], in host memory: the same, as the host decides it, see is_masked
  Failure* failure;
  uint64_t* waiting;  // in host memory: the wait that lasts now, see tell_wait
};

// A wait that lasts is told to the host again and again, as code | peer | time waited, so that a word that no longer
// changes is that of a wait which is over. eprt/ep/nvlink/waiting.py reads it. Each wait tells in the first
// millisecond of every quarter of a second, so that many threads that wait do not fill the link to the host.
constexpr uint32_t kTellBits = 28, kToldBits = 20;  // of nanoseconds: 268 ms, 1 ms

EPRT_DEVICE void tell_wait(const Deadline& deadline, uint32_t code, uint32_t peer, uint64_t waited_ns) {
  if (waited_ns >> kTellBits == 0 || (waited_ns & ((1ull << kTellBits) - 1)) >> kToldBits) return;
  store_relaxed(deadline.waiting, uint64_t(code) << 56 | uint64_t(peer & 0xff) << 48 | waited_ns >> kToldBits);
}

// Whether a rank that was awaited for so long is masked now. The host stores into its own memory what it decides, since
// that needs no call of CUDA's (eprt/ep/nvlink/rank_mask.py). To read it takes microseconds, so a wait does so in the
// first eighth of every millisecond but the first, and then tells what follows.
constexpr uint32_t kHostLookBits = 20, kHostLooksBits = 17;  // of nanoseconds

EPRT_DEVICE bool is_masked(const Deadline& deadline, uint32_t peer, uint64_t waited_ns) {
  if (load_relaxed(deadline.mask + peer)) return true;
  if (waited_ns >> kHostLookBits == 0 || (waited_ns & ((1ull << kHostLookBits) - 1)) >> kHostLooksBits) return false;
  if (!load_relaxed(deadline.told + peer)) return false;
  store_relaxed(deadline.mask + peer, 1u);
  return true;
}

// How a wait ended. The clock is read before each look at the flag, inside the loop: the compiler reconverges the lanes
// of a warp when the last of them is done, so a clock read after the loop would give the time of the last lane.
struct WaitEnd {
  bool arrived;
  uint64_t ns;  // the time of the end
};

// Waits until *flag is `expected`. At the deadline: reports, masks the peer so that nobody waits for it again. Flags
// are never cleared, and one that few batches use may be 2^31 calls old (two weeks of decoding), so the test is ==.
// kOrLater: for a word that every call writes and that may be ahead.
template <bool kOrLater>
__device__ __noinline__ WaitEnd wait_longer(const uint32_t* flag, uint32_t expected, const Deadline& deadline,
                                            uint32_t code, uint32_t peer) {
  const uint64_t start = global_timer_ns();
  for (int look = 1;; ++look) {
    const uint64_t now = global_timer_ns();
    const uint32_t seen = load_acquire_sys(flag);
    if (seen == expected || (kOrLater && int32_t(seen - expected) > 0)) return {true, now};
    if (look % 64) continue;
    if (is_masked(deadline, peer, now - start)) return {false, now};
    tell_wait(deadline, code, peer, now - start);
    if (now - start > deadline.timeout_ns) {
      report(deadline.failure, code, peer, seen, expected);
      store_relaxed(deadline.mask + peer, 1u);
      return {false, now};
    }
  }
}

// ---- numbers --------------------------------------------------------------------------------------------------------

constexpr int kScaleGroup = 128;  // values per fp8 scale
constexpr float kFp8Max = 448.f;
constexpr float kTiny = 1e-30f;  // keeps a group of zeros from dividing by zero

EPRT_DEVICE float bf16_lo(uint32_t w) { return __uint_as_float(w << 16); }
EPRT_DEVICE float bf16_hi(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }

// -inf: the largest of no numbers, log2 of the weight of nothing.
EPRT_DEVICE float nothing() { return __uint_as_float(0xff800000u); }

EPRT_DEVICE uint32_t pack_bf16(float lo, float hi) {  // round to nearest even
  uint32_t w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
  return w;
}

#if __CUDA_ARCH__ >= 890
EPRT_DEVICE uint32_t pack_fp8(float a, float b, float c, float d) {  // e4m3, nearest even, saturating
  uint16_t lo, hi;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(d), "f"(c));
  return uint32_t(lo) | (uint32_t(hi) << 16);
}
#else
EPRT_DEVICE uint32_t fp8_bits(float x) {
  const uint32_t sign = (__float_as_uint(x) >> 24) & 0x80;
  if (x != x) return sign | 0x7f;
  const float a = fminf(fabsf(x), kFp8Max);
  if (a < 0.015625f) return sign | __float2int_rn(a * 512.f);  // subnormal: steps of 2^-9; 8 of them are 2^-6
  uint32_t bits = __float_as_uint(a);
  bits += 0x7ffff + ((bits >> 20) & 1);  // keep 3 bits of mantissa
  return sign | ((bits >> 20) - (120 << 3));
}

EPRT_DEVICE uint32_t pack_fp8(float a, float b, float c, float d) {
  return fp8_bits(a) | fp8_bits(b) << 8 | fp8_bits(c) << 16 | fp8_bits(d) << 24;
}
#endif

struct Fp8Scale {
  float scale;   // value = fp8 * scale
  float factor;  // fp8 = value * factor
};

// The scale of a group whose largest magnitude is amax; ue8m0: rounded up to a power of two.
EPRT_DEVICE Fp8Scale fp8_scale(float amax, bool ue8m0) {
  amax = fmaxf(amax, kTiny);
  const float scale = __fdiv_rn(amax, kFp8Max);
  if (!ue8m0) return {scale, __fdiv_rn(kFp8Max, amax)};
  const float rounded = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u);
  return {rounded, __fdiv_rn(1.f, rounded)};
}

}  // namespace eprt
