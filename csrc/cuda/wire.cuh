// The wire to ranks of other nodes, whose memory is not mapped here: what the kernels ask of it. wire_nvshmem.cu has it
// by NVSHMEM, and is linked to the kernels that use it; tests/emulated has one that delivers late and in any order.
//
// Contract: a word is there only after the bytes that were put with it; nothing else has an order. What is put is read
// until then, so it stays as it is until the peer has shown that it came. Addresses are symmetric: where the bytes and
// the word would lie in this rank's heap.
#pragma once
#include "common.cuh"

// Copies bytes into the peer's heap, then sets a word there. Called by all lanes of a warp.
extern "C" __device__ void eprt_wire_put(void* to, const void* from, unsigned long long bytes, void* word,
                                         unsigned long long value, int peer);
// Sets a word in the peer's heap. Called by one thread.
extern "C" __device__ void eprt_wire_post(void* word, unsigned long long value, int peer);
// Called by one thread that has seen this value in a word of its own heap: what was put with it can be read from now
// on.
extern "C" __device__ void eprt_wire_see(void* word, unsigned long long value);

namespace eprt {

EPRT_DEVICE uint64_t compare_and_swap_acq_rel(uint64_t* p, uint64_t expected, uint64_t v) {
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(expected), "l"(v)
               : "memory");
  return old;
}

// How many times the counter was counted up in this epoch. It begins anew with each, so nothing is left of a launch in
// which some warps took a rank for masked and others did not.
EPRT_DEVICE uint32_t count_up(uint64_t* counter, uint32_t epoch) {
  uint64_t old = load_relaxed(counter);
  for (;;) {
    const uint64_t next = (uint32_t(old >> 32) == epoch ? old : uint64_t(epoch) << 32) + 1;
    const uint64_t seen = compare_and_swap_acq_rel(counter, old, next);
    if (seen == old) return uint32_t(next);
    old = seen;
  }
}

// Whether this warp is the last of `warps` to have done its part in this epoch; then it sees what all have stored.
// Called by all lanes.
EPRT_DEVICE bool is_last_warp(uint64_t* counter, uint32_t epoch, uint32_t warps, int lane) {
  __syncwarp();  // orders the stores of all lanes before lane 0's release
  uint32_t n = 0;
  if (lane == 0) n = count_up(counter, epoch);
  const bool is_last = __shfl_sync(kAllLanes, n, 0) == warps;
  __syncwarp();  // orders lane 0's acquire before the loads of all lanes
  return is_last;
}

}  // namespace eprt
