// Loads of mla_decode.cu: what its thread blocks share, and the warp that keeps two blocks of positions on their way.
//
// An entry of the cache has kTiles tiles of 64 values, in shared memory as tensor cores read them. The tiles of a block
// come in groups, each with a barrier, so products begin when the first has come. Tiles are loaded again as soon as
// both warpgroups of all thread blocks of the cluster have released them.
#pragma once
#include "cluster.cuh"
#include "mla_boxes.cuh"
#include "mla_gather.cuh"
#include "tensor_map.cuh"

namespace eprt {

constexpr int kTiles = kEntry / 64;   // of 64 columns; the last has the rotated keys
constexpr int kTileBytes = 64 * 128;  // 64 rows
constexpr int kHalf = 4;              // tiles of half an output
constexpr int kRope = kTiles - 1;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2 * kWarpgroup;  // threads
constexpr int kThreads = kConsumers + kWarpgroup;
constexpr int kGroups = 5;  // that tiles come in: four of two, and the last

struct MlaDecodeParams {
  TensorMap q;        // [tokens * heads, kEntry], boxes of kRows rows, 3 tiles
  TensorMap kv;       // [pages * page_size, kEntry], boxes of box_rows rows, 1 tile
  TensorMap kv_pair;  // the same, 2 tiles
  Lengths all;
  const uint8_t* entries;     // the cache
  const Bound* bound;         // [shares + 1]
  const int32_t* page_table;  // [requests, table_width]
  uint16_t* out;              // bf16 [tokens, heads, kLatent]
  float* partial;             // [2 shares, kGroupRows, kLatent]
  float* log_sum;             // [2 shares, kGroupRows]
  int32_t table_width;
  int32_t page_size;   // a multiple of 16; 1 with GATHER
  int32_t box_rows;    // 16, 32 or 64: divides page_size
  int32_t cache_rows;  // pages * page_size
  float scale;         // of scores
};

struct alignas(8) Pair {
  float first, second;
};

struct Shared {
  uint8_t q[kTiles][kTileBytes];
  uint8_t kv[2][kTiles][kTileBytes];
  Pair most[kRows / 2];       // log2 scale of the weights: of each thread's two rows, quad after quad
  float sum[2][2][kRows];     // by segment's parity, warpgroup: of weights
  uint64_t full[2][kGroups];  // barriers of a buffer's tiles
  uint64_t empty[2][2];       // of a buffer's tiles that warpgroup w is the last to read: see release
  uint64_t q_full, q_empty;
};

// As load_tiles, of the cache, to all thread blocks of the cluster. It is read once, so L2 had better keep other
// things.
EPRT_DEVICE void load_tiles_for_all(void* to, const TensorMap* map, int row, int tile, uint64_t* barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  if (kCtas > 1)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(shared_address(to)),
        "l"(map), "r"(0), "r"(row), "r"(tile), "r"(shared_address(barrier)), "h"(uint16_t((1 << kCtas) - 1)),
        "l"(policy)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
        "%3, %4}], [%5], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(0), "r"(row), "r"(tile), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// Loads the tiles of half w of a block, and with_last the last tile, in all thread blocks of the cluster. Of two groups
// of tiles each thread block loads one.
template <int kPerBlock>
EPRT_DEVICE void load_half(const MlaDecodeParams& p, Shared& s, int buffer, int w, bool with_last, int rank,
                           const int (&row)[kPerBlock]) {
  constexpr int kBoxBytes = kTileBytes / kPerBlock;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int group = i < 2 ? 2 * w + i : kGroups - 1, tile = 2 * group;
    if (i == 2 && !with_last) break;
    barrier_expect(&s.full[buffer][group], i < 2 ? 2 * kTileBytes : kTileBytes);
    if (kCtas > 1 && rank != (i < 2 ? i : buffer)) continue;
    if (kPerBlock == 1) {
      load_tiles_for_all(s.kv[buffer][tile], i < 2 ? &p.kv_pair : &p.kv, row[0], tile, &s.full[buffer][group]);
    } else {
#pragma unroll
      for (int box = 0; box < kPerBlock; ++box)
#pragma unroll
        for (int k = 0; k < (i < 2 ? 2 : 1); ++k)
          load_tiles_for_all(s.kv[buffer][tile + k] + box * kBoxBytes, &p.kv, row[box], tile + k,
                             &s.full[buffer][group]);
    }
  }
}

// Called by one warp.
template <int kPerBlock>
EPRT_DEVICE void load(const MlaDecodeParams& p, Shared& s, int share, int rank) {
  const bool leader = threadIdx.x % kWarp == 0;
  uint32_t used[2] = {}, segments = 0;  // buffers, before this segment
  Walk walk(p.all, p.bound, share);
  Segment segment;
  while (walk.next(segment)) {
    const int count = segment.end - segment.begin;
    if (count == 0) continue;
    Boxes<kPerBlock, MlaDecodeParams> boxes(p, segment);
    barrier_wait(&s.q_empty, ~segments & 1);
    if (leader) {
      const int first = segment.request.first_token * p.all.heads + segment.group * kGroupRows + rank * kRows;
      barrier_expect(&s.q_full, sizeof(s.q));
      for (int tile = 0; tile < kTiles; tile += 3) load_tiles(s.q[tile], &p.q, first, tile, &s.q_full);
    }
    ++segments;
    for (int i = 0; i < count; ++i) {
      const int buffer = i % 2;
      const uint32_t parity = ~((buffer ? used[1] : used[0]) + i / 2) & 1;
      boxes.pass(i * kPerBlock);
      int row[kPerBlock];
#pragma unroll
      for (int box = 0; box < kPerBlock; ++box) row[box] = boxes.row_of(i * kPerBlock + box);
#pragma unroll
      for (int late = 0; late < 2; ++late) {  // first the half of the warpgroup that computes the block's weights
        const int w = late ? 1 - buffer : buffer;
        barrier_wait(&s.empty[buffer][w], parity);
        if (leader) load_half(p, s, buffer, w, late, rank, row);
      }
    }
    used[0] += (count + 1) / 2, used[1] += count / 2;
  }
}

// The same for pages of one token, by all threads of a warpgroup.
EPRT_DEVICE void gather(const MlaDecodeParams& p, Shared& s, int share, int rank) {
  uint32_t used[2] = {}, segments = 0;
  Walk walk(p.all, p.bound, share);
  Segment segment;
  while (walk.next(segment)) {
    const int count = segment.end - segment.begin;
    if (count == 0) continue;
    const int32_t* slots = p.page_table + int64_t(segment.index) * p.table_width;
    Gathered<2 * kEntry> entries(p.entries, slots, segment.request.length, segment.begin);
    barrier_wait(&s.q_empty, ~segments & 1);
    if (threadIdx.x == kConsumers) {
      const int first = segment.request.first_token * p.all.heads + segment.group * kGroupRows + rank * kRows;
      barrier_expect(&s.q_full, sizeof(s.q));
      for (int tile = 0; tile < kTiles; tile += 3) load_tiles(s.q[tile], &p.q, first, tile, &s.q_full);
    }
    ++segments;
    for (int i = 0; i < count; ++i) {
      const int buffer = i % 2;
      const uint32_t parity = ~((buffer ? used[1] : used[0]) + i / 2) & 1;
      entries.begin(segment.begin + i);
#pragma unroll
      for (int late = 0; late < 2; ++late) {
        const int w = late ? 1 - buffer : buffer;
        barrier_wait(&s.empty[buffer][w], parity);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int group = 2 * w + pair;
          entries.copy_tile(s.kv[buffer][2 * group], 256 * group);
          entries.copy_tile(s.kv[buffer][2 * group + 1], 256 * group + 128);
          arrive_when_copied(&s.full[buffer][group]);
        }
        if (!late) continue;
        entries.copy_tile(s.kv[buffer][kRope], 128 * kRope);
        arrive_when_copied(&s.full[buffer][kGroups - 1]);
      }
    }
    used[0] += (count + 1) / 2, used[1] += count / 2;
  }
}

}  // namespace eprt
