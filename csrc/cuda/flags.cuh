// Flags in other GPUs' memory, raised by one warp of a thread block on behalf of all others.
//
// A fence over NVLink takes about a microsecond, and an SM executes fences one after another. So each fence serves all
// flags that the other warps have handed in since the last one.
#pragma once
#include "common.cuh"

namespace eprt {

// ---- barriers in shared memory (mbarrier) ---------------------------------------------------------------------------
//
// A phase ends when all expected threads have arrived. Who sees it end sees what they did before arriving.

EPRT_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

EPRT_DEVICE void barrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

EPRT_DEVICE void barrier_arrive(uint64_t* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(shared_address(barrier))
               : "memory");
}

// Whether the phase of this parity has ended. The phase before the first one has.
EPRT_DEVICE bool barrier_ended(uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(ended)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return ended;
}

// ---- flags ----------------------------------------------------------------------------------------------------------

struct FlagDesk {  // in shared memory, one per warp
  uint32_t* flag[kWarp];
  uint64_t full, empty;  // barriers; all lanes of the one side arrive
  bool used, last;       // whether the warp hands in flags; whether these are its last
};

// Called by one lane, before a barrier.
EPRT_DEVICE void open_desk(FlagDesk* desk, bool used) {
  barrier_init(&desk->full, kWarp);
  barrier_init(&desk->empty, kWarp);
  desk->used = used, desk->last = false;
}

// The side of the desk at which a warp hands in flags.
struct FlagSource {
  FlagDesk* desk;
  uint32_t parity = 1;  // of the phase of `empty` to wait for

  // Hands in a flag per lane (or null) after the data it announces was stored by this lane, or before a __syncwarp.
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

// What the flag warp does until all desks are closed. Lane w serves desks[w].
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
    __threadfence_system();  // after the ballot: orders what was stored before the desks were full before these stores
    for (uint32_t left = full; left; left &= left - 1) {
      const int w = __ffs(left) - 1;
      FlagDesk& desk = desks[w];
      const uint32_t its_parity = __shfl_sync(kAllLanes, parity, w);
      while (!barrier_ended(&desk.full, its_parity)) {
      }  // lane w has seen the phase end; the other lanes see it here
      if (uint32_t* flag = desk.flag[lane]) store_relaxed(flag, epoch);
      if (lane == w) closed = desk.last;
      barrier_arrive(&desk.empty);
    }
    if (ready) parity ^= 1;
  }
}

}  // namespace eprt
