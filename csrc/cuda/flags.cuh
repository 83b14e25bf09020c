// Flags in other GPUs' memory, raised by one warp of a thread block for all others.
//
// A fence over NVLink takes about a microsecond, and a multiprocessor does one after another. So each fence serves
// whatever the other warps have handed in since the last.
#pragma once
#include "common.cuh"

namespace eprt {

struct FlagDesk {  // in shared memory, one per warp
  uint32_t* flag[kWarp];
  uint32_t state;
};

enum DeskState : uint32_t { kEmpty, kFull, kClosed };

EPRT_DEVICE uint32_t desk_state(const FlagDesk* desk) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
               : "=r"(v)
               : "r"(uint32_t(__cvta_generic_to_shared(&desk->state)))
               : "memory");
  return v;
}

EPRT_DEVICE void set_desk_state(FlagDesk* desk, uint32_t state) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(uint32_t(__cvta_generic_to_shared(&desk->state))),
               "r"(state)
               : "memory");
}

// Lanes' flags, once what they announce has been stored, or is ordered before this by __syncwarp.
EPRT_DEVICE void hand_in(FlagDesk* desk, uint32_t* flag, int lane) {
  if (!__any_sync(kAllLanes, flag != nullptr)) return;
  while (desk_state(desk) != kEmpty) __nanosleep(50);
  desk->flag[lane] = flag;
  __syncwarp();  // puts the lanes' stores before the release (cumulativity)
  if (lane == 0) set_desk_state(desk, kFull);
  __syncwarp();
}

EPRT_DEVICE void close_desk(FlagDesk* desk, int lane) {
  while (desk_state(desk) != kEmpty) __nanosleep(50);
  __syncwarp();
  if (lane == 0) set_desk_state(desk, kClosed);
}

// The warp that raises flags, until all desks are closed. Lane w looks after desks[w].
template <int kDesks>
EPRT_DEVICE void raise_flags(FlagDesk* desks, uint32_t epoch, int lane) {
  for (;;) {
    const uint32_t state = lane < kDesks ? desk_state(desks + lane) : uint32_t(kClosed);
    const uint32_t full = __ballot_sync(kAllLanes, state == kFull);
    if (!full) {
      if (__all_sync(kAllLanes, state == kClosed)) return;
      __nanosleep(50);
      continue;
    }
    __threadfence_system();  // after the ballot: puts what was stored before the desks' releases before these stores
    for (uint32_t left = full; left; left &= left - 1)
      if (uint32_t* flag = desks[__ffs(left) - 1].flag[lane]) store_relaxed(flag, epoch);
    __syncwarp();
    if (state == kFull) set_desk_state(desks + lane, kEmpty);
  }
}

}  // namespace eprt
