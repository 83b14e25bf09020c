// Loads of mla_dense_fp8.cu: what its thread blocks share, and how blocks of positions come there.
// A stage is loaded again as soon as all warps of all thread blocks of the cluster that read it have released it.
#pragma once
#include "mla_fp8.cuh"

namespace eprt {

constexpr int kSlots = 4;  // for weights of blocks on their way from scorers to adders
constexpr int kWarps = 4;
constexpr int kThreads = 4 * kWarpgroup;  // two warpgroups of scorers, two of adders
constexpr int kReaders = 3 * kWarps;      // warps of a thread block that read a stage: a scorer's, the adders'

// Where a warpgroup is in its share. block: of the segment, the first whose place is not known yet.
struct Place {
  Bound at;
  Segment segment;
  int block;
  bool more;
};

// Every buffer has two barriers: one ends a phase when the buffer is filled, the other one when it may be filled again.
// Stages: full, empty. Queries: q_full, q_empty, one for each scorer. Slots of weights with their factors: weighed,
// taken. Sums and scales of segments: summed, divided. A row's scale, `most`, has a pair of warps, one of each scorer,
// which use it in turns: raised[w] says that scorer w's warp is done.
struct Shared {
  uint8_t q[kQueryTiles][kTileBytes];
  Stage stage[kStages];
  uint8_t weights[kSlots / 2][kTileBytes];  // slot i: [row, 128] of tile i / 2, the 64 bytes from 64 (i % 2) on
  float fade[kSlots][kRows];                // what sums are multiplied by before the slot's block is added
  float most[kRows];                        // log2 scale of the weights of the last block
  float sum[2][2][kRows];                   // of segments in turns: weights of either scorer's blocks
  float last_most[2][kRows];                // of segments in turns: scale at the end
  int32_t fades[kSlots][kWarps];            // whether a factor of the warp's rows is not 1
  Place walk[kThreads / kWarpgroup], ahead[2];
  uint64_t full[kStages], empty[kStages];
  uint64_t q_full, q_empty[2];
  uint64_t weighed[kSlots], taken[kSlots];
  uint64_t summed[2], divided[2];
  uint64_t raised[2][kWarps];
};

// As load_tiles, to all thread blocks of the cluster.
EPRT_DEVICE void load_tiles_for_all(void* to, const TensorMap* map, int row, int tile, uint64_t* barrier) {
  if (kCtas == 1) return load_tiles(to, map, row, tile, barrier);
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(row), "r"(tile), "r"(shared_address(barrier)), "h"(uint16_t((1 << kCtas) - 1))
      : "memory");
}

// Loads blocks of a scorer for it, which every other block of the share is: called by one of its warps. The lanes know
// where boxes of the next blocks lie (a window), so that a load is a few instructions: the scorer waits for them.
struct Loader {
  const MlaDecodeFp8Params& p;
  Shared& s;
  const int rank, lane, w;
  int row;           // of the cache, in which box `lane` of the window begins
  int at, left = 0;  // in the window: the first box of the next block; blocks from there on

  EPRT_DEVICE Loader(const MlaDecodeFp8Params& p, Shared& s, int rank, int w)
      : p(p), s(s), rank(rank), lane(threadIdx.x % kWarp), w(w) {}

  // Of a block; no division, which takes as long as a load's instructions together.
  EPRT_DEVICE int boxes() const { return p.box_rows == kKeys ? 1 : p.box_rows == kKeys / 2 ? 2 : 4; }

  EPRT_DEVICE void begin(int share) {
    Place& next = s.ahead[w];
    if (lane == 0) next.at = p.bound[share], next.segment.end = 0, next.block = w, next.more = true;
    fill(share);
  }

  // Finds the places of the next blocks, all of one segment.
  EPRT_DEVICE void fill(int share) {
    Place& next = s.ahead[w];
    if (lane == 0) {
      while (next.more && next.block >= next.segment.end) {
        const int behind = next.block - next.segment.end;
        Walk walk(p.all, p.bound, share);
        walk.at = next.at;
        next.more = walk.next(next.segment);
        next.at = walk.at, next.block = next.segment.begin + behind;
      }
    }
    __syncwarp();
    if (!uniform(next.more)) return;
    const int each = boxes(), block = uniform(next.block) + lane / each * 2;
    const int position = block * kKeys + lane % each * p.box_rows;
    at = 0, left = uniform(min(kWarp / each, (next.segment.end - block + 1) / 2));
    row = p.cache_rows;  // one behind the cache, from where zeros are loaded, for a box behind the context
    if (block < next.segment.end && position < next.segment.request.length)
      row = __ldg(p.page_table + int64_t(next.segment.index) * p.table_width + position / p.page_size) * p.page_size +
            position % p.page_size;
    __syncwarp();
    if (lane == 0) next.block += 2 * left;
  }

  // The next block, once the stage is free. Each of two thread blocks loads half of the latents, and in turns the rest,
  // for both.
  EPRT_DEVICE void load(const TurnOf<kStages>& to, int share) {
    if (left == 0) return;
    Stage& stage = s.stage[to.index];
    uint64_t* full = &s.full[to.index];
    barrier_wait(&s.empty[to.index], ~to.parity & 1);
    if (lane == 0) barrier_expect(full, sizeof(Stage));
    const int box_bytes = p.box_rows * 128;
    for (int box = 0; box < boxes(); ++box) {
      const int from = __shfl_sync(kAllLanes, row, at + box);
      if (lane != 0) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (kCtas > 1 && rank != half) continue;
        if (p.box_rows == kKeys) {
          load_tiles_for_all(stage.latent[2 * half], &p.latent, from, 2 * half, full);
        } else {
          for (int k = 2 * half; k < 2 * half + 2; ++k)
            load_tiles_for_all(stage.latent[k] + box * box_bytes, &p.rope, from, k, full);
        }
      }
      if (kCtas == 1 || rank == w) load_tiles_for_all(stage.rope + box * box_bytes, &p.rope, from, kLatentTiles, full);
      if (kCtas == 1 || rank != w)
        load_tiles_for_all(stage.scale + box * p.box_rows * kScaleBytes, &p.scale, from, 0, full);
    }
    at += boxes();
    if (--left == 0) fill(share);
  }

  // The queries of a segment, once those of the one before are not needed any more. segments: before.
  EPRT_DEVICE void load_queries(const Segment& segment, uint32_t segments) {
    for (int i = 0; i < 2; ++i) barrier_wait(&s.q_empty[i], ~segments & 1);
    if (lane != 0) return;
    const int first = segment.request.first_token * p.all.heads + segment.group * kGroupRows + rank * kRows;
    barrier_expect(&s.q_full, sizeof(s.q));
    load_tiles(s.q, &p.q, first, 0, &s.q_full);
  }
};

constexpr int kOfWarpgroup = 1;  // the first of the warpgroups' barriers

// A warpgroup walks through its share. Both scorers, and both adders, run the same code, which should fit into caches.
struct Consumer {
  const MlaDecodeFp8Params& p;
  Shared& s;
  const int index, w;  // of the warpgroup; among scorers or adders
  const int rank, share, lane, warp;
  TurnOf<kStages> stage;  // of the next block
  TurnOf<kSlots> slot;    // of the next block

  EPRT_DEVICE Consumer(const MlaDecodeFp8Params& p, Shared& s, int index, int rank)
      : p(p),
        s(s),
        index(index),
        w(index % 2),
        rank(rank),
        share(blockIdx.x / kCtas),
        lane(threadIdx.x % kWarp),
        warp(uniform(threadIdx.x / kWarp % kWarps)) {}

  EPRT_DEVICE const Segment& segment() const { return s.walk[index].segment; }
  EPRT_DEVICE int first_row() const { return segment().group * kGroupRows + rank * kRows; }
  EPRT_DEVICE void sync() { barrier_sync(kOfWarpgroup + index, kWarpgroup); }

  // The next segment of the share, in shared memory: registers are scarce.
  EPRT_DEVICE bool next(bool first) {
    sync();  // nobody reads the last one any more
    if (threadIdx.x % kWarpgroup == 0) {
      Place& place = s.walk[index];
      Walk walk(p.all, p.bound, share);
      if (!first) walk.at = place.at;
      place.more = walk.next(place.segment);
      place.at = walk.at;
    }
    sync();
    return uniform(s.walk[index].more);
  }

  // This warp has read the stage: no load of it is on its way to registers any more.
  EPRT_DEVICE void release(const TurnOf<kStages>& of) {
    __syncwarp();
    if (lane < kCtas) barrier_arrive_at(&s.empty[of.index], lane);
  }

  // This warp is done with what it did before.
  EPRT_DEVICE void tell(uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }
};

}  // namespace eprt
