// A warp's stream of rows through shared memory: bulk copies (TMA) bring rows in and take them out, so many bytes are
// in flight with few registers and instructions. Before sm_90 the warp's own loads and stores do the same.
#pragma once
#include "flags.cuh"

namespace eprt {

// The value of lane `from` (of a pointer).
EPRT_DEVICE uint8_t* pointer_of(const uint8_t* mine, int from) {
  return reinterpret_cast<uint8_t*>(__shfl_sync(kAllLanes, uint64_t(mine), from));
}

#if __CUDA_ARCH__ >= 900
EPRT_DEVICE void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

EPRT_DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t ended = 0;
  while (!ended)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
}

EPRT_DEVICE void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Called by one thread; the copy joins the thread's current group.
EPRT_DEVICE void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}

EPRT_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all of the thread's groups but the last N have read their shared memory.
template <int N>
EPRT_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Waits until all of the thread's groups but the last N are written at their destination.
template <int N>
EPRT_DEVICE void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Orders what this thread wrote to shared memory, or saw written there, before bulk copies of the same bytes.
EPRT_DEVICE void bulk_fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for global memory.
EPRT_DEVICE void bulk_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
#else
EPRT_DEVICE void bulk_commit() {}
template <int N>
EPRT_DEVICE void bulk_wait_read() {}
template <int N>
EPRT_DEVICE void bulk_wait_written() {}
EPRT_DEVICE void bulk_fence_shared() { __syncwarp(); }
EPRT_DEVICE void bulk_fence_global() {}
#endif

// Copies a piece in shared memory to the destinations of all lanes that have one. The copies join the current group.
EPRT_DEVICE void copy_piece(uint8_t* my_to, const uint8_t* slot, int bytes, int lane) {
#if __CUDA_ARCH__ >= 900
  if (my_to) bulk_store(my_to, slot, bytes);
#else
  for (uint32_t left = __ballot_sync(kAllLanes, my_to != nullptr); left; left &= left - 1) {
    uint8_t* to = pointer_of(my_to, __ffs(left) - 1);
    for (int at = lane * 16; at < bytes; at += kWarp * 16) store(to + at, *reinterpret_cast<const Vec16*>(slot + at));
  }
  __syncwarp();
#endif
}

// The same, as a group of its own.
EPRT_DEVICE void store_piece(uint8_t* my_to, const uint8_t* slot, int bytes, int lane) {
  copy_piece(my_to, slot, bytes, lane);
  bulk_commit();
}

// A warp's slots for pieces of rows in shared memory, used in turn.
template <int kSlots>
struct Ring {
  uint8_t* slot;                     // [kSlots][slot_bytes]
  uint64_t* full;                    // [kSlots]: barriers, which end a phase when the slot is filled
  int slot_bytes;                    // a multiple of 16
  int next_load = 0, next_take = 0;  // the next slot to fill, to read
  uint32_t parity = 0;               // of the phase to wait for, of the slots from next_take on

  EPRT_DEVICE Ring(uint8_t* slots, uint64_t* barriers, int slot_bytes, int lane)
      : slot(slots), full(barriers), slot_bytes(slot_bytes) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      for (int i = 0; i < kSlots; ++i) barrier_init(full + i, 1);
      bulk_fence_shared();
    }
    __syncwarp();
#endif
  }

  // Fills the next slot, which nobody may still read. `from` and `bytes` are multiples of 16, equal in all lanes. Where
  // more_bytes > 0, so many bytes from `more` follow at byte more_at of the slot.
  EPRT_DEVICE void load(const uint8_t* from, int bytes, int lane, const uint8_t* more = nullptr, int more_bytes = 0,
                        int more_at = 0) {
    const int i = next_load;
    uint8_t* to = slot + i * slot_bytes;
    next_load = i + 1 == kSlots ? 0 : i + 1;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      barrier_expect(full + i, bytes + more_bytes);
      bulk_load(to, from, bytes, full + i);
      if (more_bytes > 0) bulk_load(to + more_at, more, more_bytes, full + i);
    }
#else
    for (int at = lane * 16; at < bytes; at += kWarp * 16)
      *reinterpret_cast<Vec16*>(to + at) = load_peer_written(from + at);
    for (int at = lane * 16; at < more_bytes; at += kWarp * 16)
      *reinterpret_cast<Vec16*>(to + more_at + at) = load_peer_written(more + at);
    __syncwarp();
#endif
  }

  EPRT_DEVICE uint8_t* take() {
    const int i = next_take;
#if __CUDA_ARCH__ >= 900
    barrier_wait(full + i, parity);
#endif
    next_take = i + 1 == kSlots ? 0 : i + 1;
    if (next_take == 0) parity ^= 1;
    return slot + i * slot_bytes;
  }
};

// Waits until all groups but the last `groups` (rounded down to a power of two, at most 16) are written.
EPRT_DEVICE void bulk_wait_all_but(int groups) {
  if (groups >= 16)
    bulk_wait_written<16>();
  else if (groups >= 8)
    bulk_wait_written<8>();
  else if (groups >= 4)
    bulk_wait_written<4>();
  else if (groups >= 2)
    bulk_wait_written<2>();
  else
    bulk_wait_written<0>();
}

// Flags of the last rows. A flag is handed in when the copies of kRows more rows have been issued and its own are
// written, so the warp goes on while copies are in flight.
template <int kRows>
struct LateFlags {
  static_assert(kRows == 1 || kRows == 2);
  FlagSource source;
  uint32_t* flag[kRows] = {};
  int last_groups = 0;  // kRows == 2: groups of the previous row

  // Called after the commit of the copies that the flag announces, which are in `groups` groups.
  EPRT_DEVICE void add(uint32_t* next, int groups, int lane) {
    bulk_wait_all_but(last_groups + groups);
    source.hand_in(flag[0], lane);
    flag[0] = flag[kRows - 1];
    flag[kRows - 1] = next;
    if (kRows == 2) last_groups = groups;
  }

  EPRT_DEVICE void close(int lane) {
    bulk_wait_written<0>();
    source.hand_in(flag[0], lane);
    if (kRows == 2) source.hand_in(flag[kRows - 1], lane);
    source.close(lane);
  }
};

}  // namespace eprt
