// A warp's stream of pieces through shared memory: bulk copies (TMA) bring them in and take them out, so that many
// bytes are under way with few registers and few instructions. Before sm_90 the warp's own loads and stores do the
// same.
#pragma once
#include "common.cuh"

namespace eprt {

constexpr int kPieceBytes = 2048;
constexpr int kPieceVectors = kPieceBytes / 16;
constexpr int kPieceLane = kPieceVectors / kWarp;
constexpr int kSlots = 4;  // pieces of a warp in flight

#if __CUDA_ARCH__ >= 900
EPRT_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

EPRT_DEVICE void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

EPRT_DEVICE void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

EPRT_DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
}

EPRT_DEVICE void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// By one thread, into its current group.
EPRT_DEVICE void bulk_store(void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}

EPRT_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all of the thread's groups but the last N have read their shared memory.
template <int N>
EPRT_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Until all of them are written, where they go.
EPRT_DEVICE void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders what this thread wrote or saw with ordinary accesses before bulk copies of the same bytes.
EPRT_DEVICE void bulk_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
#else
EPRT_DEVICE void bulk_store(void* to, const void* from, uint32_t bytes) {
  for (uint32_t at = 0; at < bytes; at += 16)
    store(static_cast<uint8_t*>(to) + at, *reinterpret_cast<const Vec16*>(static_cast<const uint8_t*>(from) + at));
}
EPRT_DEVICE void bulk_commit() {}
template <int N>
EPRT_DEVICE void bulk_wait_read() {}
EPRT_DEVICE void bulk_wait_written() {}
EPRT_DEVICE void bulk_fence() { __syncwarp(); }
#endif

// kSlots pieces of a warp in shared memory, used in turn.
struct Ring {
  uint8_t* slot;   // [kSlots][kPieceBytes]
  uint64_t* full;  // [kSlots]
  uint32_t issued = 0, taken = 0;

  EPRT_DEVICE Ring(uint8_t* slots, uint64_t* barriers, int lane) : slot(slots), full(barriers) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      for (int i = 0; i < kSlots; ++i) barrier_init(full + i);
      bulk_fence();
    }
    __syncwarp();
#endif
  }

  // Into a slot that nobody reads any more. `from` and `bytes` are multiples of 16, equal in all lanes.
  EPRT_DEVICE void load(const uint8_t* from, int bytes, int lane) {
    const int i = issued++ % kSlots;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      barrier_expect(full + i, bytes);
      bulk_load(slot + i * kPieceBytes, from, bytes, full + i);
    }
#else
    for (int at = lane * 16; at < bytes; at += kWarp * 16)
      *reinterpret_cast<Vec16*>(slot + i * kPieceBytes + at) = load_peer_written(from + at);
    __syncwarp();
#endif
  }

  EPRT_DEVICE uint8_t* take() {
    const int i = taken % kSlots;
#if __CUDA_ARCH__ >= 900
    barrier_wait(full + i, taken / kSlots & 1);
#endif
    ++taken;
    return slot + i * kPieceBytes;
  }

  // Streams n pieces: source(i) tells where the i-th comes from (asked in order), use(i, slot) reads it, changes it,
  // and may bulk_store from it. In two steps, so that the first pieces are under way while the caller does something
  // else.
  template <class Source>
  EPRT_DEVICE void begin(int n, int lane, Source& source) {
    bulk_wait_read<0>();
    __syncwarp();
    for (int i = 0; i < min(n, kSlots); ++i) load_piece(source, i, lane);
  }

  template <class Source, class Use>
  EPRT_DEVICE void finish(int n, int lane, Source& source, Use& use) {
    int next = min(n, kSlots);
    for (int i = 0; i < n; ++i) {
      const bool stores = use(i, take());
      bulk_commit();
      // A slot that is stored from is free a step later, when the copy has read it; others are at once.
      if (next < n && next < i + kSlots) {
        bulk_wait_read<1>();
        __syncwarp();
        load_piece(source, next++, lane);
      }
      if (next < n && !stores) {
        __syncwarp();
        load_piece(source, next++, lane);
      }
    }
  }

 private:
  template <class Source>
  EPRT_DEVICE void load_piece(Source& source, int i, int lane) {
    const auto piece = source(i);
    load(piece.from, piece.bytes, lane);
  }
};

struct Piece {
  const uint8_t* from;
  int bytes;
};

// The i-th piece of a row.
EPRT_DEVICE int piece_bytes(int row_bytes, int i) { return min(kPieceBytes, row_bytes - i * kPieceBytes); }

// ---- flags
// -----------------------------------------------------------------------------------------------------------

// A fence over NVLink takes about a microsecond, and a multiprocessor does one after another. So one warp raises the
// flags of all others: each fence serves whatever they have handed in since the last.
struct FlagDesk {  // in shared memory, one per warp that hands in
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

// Lanes' flags, to be raised once what they have stored has arrived. Handed in late on purpose: the stores take
// microseconds, in which the warp goes on.
struct LateFlag {
  FlagDesk* desk;
  uint32_t* flag = nullptr;

  EPRT_DEVICE void hand_in(int lane) {
    if (!__any_sync(kAllLanes, flag != nullptr)) return;
    bulk_wait_written();
    while (desk_state(desk) != kEmpty) __nanosleep(50);
    desk->flag[lane] = flag;
    flag = nullptr;
    __syncwarp();  // puts the lanes' stores before the release (cumulativity)
    if (lane == 0) set_desk_state(desk, kFull);
    __syncwarp();
  }

  EPRT_DEVICE void close(int lane) {
    hand_in(lane);
    while (desk_state(desk) != kEmpty) __nanosleep(50);
    __syncwarp();
    if (lane == 0) set_desk_state(desk, kClosed);
  }
};

// The warp that raises flags, until all desks are closed. Lane w looks after warps[w].desk.
template <int kNumWarps, class Warp>
EPRT_DEVICE void raise_flags(Warp* warps, uint32_t epoch, int lane) {
  for (;;) {
    const uint32_t state = lane < kNumWarps ? desk_state(&warps[lane].desk) : uint32_t(kClosed);
    const uint32_t full = __ballot_sync(kAllLanes, state == kFull);
    if (!full) {
      if (__all_sync(kAllLanes, state == kClosed)) return;
      __nanosleep(50);
      continue;
    }
    __threadfence_system();  // after the ballot: puts what was stored before the desks' releases before these stores
    for (uint32_t left = full; left; left &= left - 1)
      if (uint32_t* flag = warps[__ffs(left) - 1].desk.flag[lane]) store_relaxed(flag, epoch);
    __syncwarp();
    if (state == kFull) set_desk_state(&warps[lane].desk, kEmpty);
  }
}

}  // namespace eprt
