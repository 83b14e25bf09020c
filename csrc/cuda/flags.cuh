// Flags in other GPUs' memory, raised by one warp of a thread block for all others.
//
// A fence over NVLink takes about a microsecond, and a multiprocessor does one after another. So each fence serves
// whatever the other warps have handed in since the last.
#pragma once
#include "common.cuh"

namespace eprt {

// ---- barriers in shared memory (mbarrier): a phase ends when all that count have arrived; what they did before is
// seen by whoever saw it end
// ---------------------------------------------------------------------------------------------------------------

EPRT_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

EPRT_DEVICE void barrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

EPRT_DEVICE void barrier_arrive(uint64_t* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(shared_address(barrier))
               : "memory");
}

// Whether the phase of this parity has ended; the phase before the first has.
EPRT_DEVICE bool barrier_ended(uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(ended)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return ended;
}

// ---- flags
// -----------------------------------------------------------------------------------------------------------

struct FlagDesk {  // in shared memory, one per warp
  uint32_t* flag[kWarp];
  uint64_t full, empty;  // barriers; all lanes of either side arrive
  bool used, last;       // whether anyone hands in; whether what lies there is the last
};

// One lane, before a barrier.
EPRT_DEVICE void open_desk(FlagDesk* desk, bool used) {
  barrier_init(&desk->full, kWarp);
  barrier_init(&desk->empty, kWarp);
  desk->used = used, desk->last = false;
}

// A warp's side of its desk.
struct FlagSource {
  FlagDesk* desk;
  uint32_t parity = 1;  // of the phase of `empty` to wait for

  // Lanes' flags, once what they announce has been stored, or is ordered before this by __syncwarp.
  EPRT_DEVICE void hand_in(uint32_t* flag, int lane) {
    if (__any_sync(kAllLanes, flag != nullptr)) put(flag, false, lane);
  }

  EPRT_DEVICE void close(int lane) { put(nullptr, true, lane); }

  EPRT_DEVICE void put(uint32_t* flag, bool last, int lane) {
    while (!barrier_ended(&desk->empty, parity)) __nanosleep(50);
    parity ^= 1;
    desk->flag[lane] = flag;
    if (last && lane == 0) desk->last = true;
    barrier_arrive(&desk->full);
  }
};

// The warp that raises flags, until all desks are closed. Lane w looks after desks[w].
template <int kDesks>
EPRT_DEVICE void raise_flags(FlagDesk* desks, uint32_t epoch, int lane) {
  uint32_t parity = 0;  // of the phase of `full` to wait for
  bool closed = lane >= kDesks || !desks[lane].used;
  for (;;) {
    const bool ready = !closed && barrier_ended(&desks[lane].full, parity);
    const uint32_t full = __ballot_sync(kAllLanes, ready);
    if (!full) {
      if (__all_sync(kAllLanes, closed)) return;
      __nanosleep(50);
      continue;
    }
    __threadfence_system();  // after the ballot: puts what was stored before the desks were full before these stores
    for (uint32_t left = full; left; left &= left - 1) {
      const int w = __ffs(left) - 1;
      FlagDesk& desk = desks[w];
      const uint32_t its_parity = __shfl_sync(kAllLanes, parity, w);
      while (!barrier_ended(&desk.full, its_parity)) {
      }  // lane w has seen it; this is for the others
      if (uint32_t* flag = desk.flag[lane]) store_relaxed(flag, epoch);
      if (lane == w) closed = desk.last;
      barrier_arrive(&desk.empty);
    }
    if (ready) parity ^= 1;
  }
}

}  // namespace eprt
