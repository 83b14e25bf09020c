// Entries of a cache by a list of slots, one for each position of a context: for attention to chosen tokens, whose
// pages have one token.
//
// Copies through tensor maps want rows that follow each other. Here a warpgroup copies 16 bytes a thread and
// instruction, into tiles of 64 rows as tensor cores read them (128-byte swizzle). A barrier counts the threads whose
// copies have come. Who multiplies orders these writes before its products by a fence: see fence_gathered.
#pragma once
#include "bulk.cuh"
#include "mla_work.cuh"

#ifndef GATHER
#define GATHER 0
#endif

namespace eprt {

constexpr bool kGather = GATHER;  // a compile-time constant: 1 for pages of one token
constexpr int kGatherers = 128;   // threads that copy

// Zeros where it is not wanted; `from` is an address of the cache even then.
EPRT_DEVICE void copy_16(void* to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(wanted ? 16 : 0)
               : "memory");
}

// Arrives at the barrier when all copies of this thread so far have come.
EPRT_DEVICE void arrive_when_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// After the wait for a barrier of copied tiles, before products that read them.
EPRT_DEVICE void fence_gathered() {
  if (kGather) bulk_fence_shared();
}

// Threads that arrive at a barrier of tiles that were loaded.
constexpr int kLoaders = kGather ? kGatherers : 1;

// Thread blocks of a cluster that read what one of them loads. With kGather each loads what it reads, at about the same
// time, so the second one finds it in L2.
constexpr int kSharers = kGather ? 1 : kCtas;

// What a thread copies of a block of positions: 16 bytes of every tile of the rows row + 16 i. The slots of the block
// after it are on their way.
template <int kEntryBytes>
struct Gathered {
  static constexpr int kMine = kKeys / (kGatherers / 8);
  const uint8_t* cache;
  const int32_t* slots;  // of the request
  int length, row, chunk;
  int next[kMine];             // slots; -1 behind the context
  const uint8_t* from[kMine];  // this block's
  bool known[kMine];

  EPRT_DEVICE Gathered(const uint8_t* cache, const int32_t* slots, int length, int block)
      : cache(cache), slots(slots), length(length), row(threadIdx.x % kGatherers / 8), chunk(threadIdx.x % 8) {
    look_up(block);
  }

  EPRT_DEVICE void look_up(int block) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int position = block * kKeys + row + 16 * i;
      next[i] = position < length ? __ldg(slots + position) : -1;
    }
  }

  // The thread copies of this block from now on; it was looked up before.
  EPRT_DEVICE void begin(int block) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      known[i] = next[i] >= 0;
      from[i] = cache + int64_t(max(next[i], 0)) * kEntryBytes + chunk * 16;
    }
    look_up(block + 1);
  }

  // 128 bytes of every entry, from `offset` on.
  EPRT_DEVICE void copy_tile(uint8_t* tile, int offset) const {
    uint8_t* to = tile + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < kMine; ++i) copy_16(to + i * 16 * 128, from[i] + offset, known[i]);
  }

  // 16 bytes of every entry, from `offset` on, one entry after the other.
  EPRT_DEVICE void copy_pieces(uint8_t* to, int offset) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      if (chunk == i) copy_16(to + (row + 16 * i) * 16, from[i] - i * 16 + offset, known[i]);
  }
};

}  // namespace eprt
