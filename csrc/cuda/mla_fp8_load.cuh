// Loads of mla_decode_fp8.cu: what its thread blocks share, and the warp that keeps blocks of positions on their way.
//
// An entry of the cache is 512 latents in e4m3, 64 rotated values in bfloat16, the fp32 scale that both were divided
// by, 12 bytes of nothing. A block of positions lies in one of kStages stages, in tiles of 128 bytes of 64 entries. A
// stage is loaded again as soon as all warps of all thread blocks of the cluster that read it have released it.
#pragma once
#include "bulk.cuh"
#include "mla_boxes.cuh"
#include "mla_gather.cuh"

namespace eprt {

constexpr int kTerms = TERMS;            // e4m3 numbers whose sum is a latent of a query, 1 or 2
constexpr int kTileBytes = kKeys * 128;  // 64 rows
constexpr int kLatentTiles = kLatent / 128;
constexpr int kQueryTiles = kTerms * kLatentTiles + 1;  // the last has the rotated queries
constexpr int kScaleBytes = 16;                         // of an entry, from its scale to its end
constexpr int kStages = kTerms == 1 ? 4 : 3;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kThreads = kConsumers + kWarpgroup;  // the rest loads
constexpr int kReaders = 8;                        // warps of a thread block that read a stage

struct alignas(64) TensorMap {
  uint64_t word[16];
};

struct MlaDecodeFp8Params {
  TensorMap q;       // [tokens * heads, 128 kQueryTiles] bytes, boxes of kRows rows, all tiles
  TensorMap latent;  // the cache, 128 bytes of an entry by box_rows by 2
  TensorMap rope;    // 128 bytes by box_rows
  TensorMap scale;   // kScaleBytes by box_rows, not swizzled
  Lengths all;
  const uint8_t* entries;     // the cache
  const Bound* bound;         // [shares + 1]
  const int32_t* page_table;  // [requests, table_width]
  const float* q_scale;       // [tokens * heads]
  uint16_t* out;              // bf16 [tokens, heads, kLatent]
  float* partial;             // [2 shares, kGroupRows, kLatent]
  float* log_sum;             // [2 shares, kGroupRows]
  int32_t q_rows;             // tokens * heads
  int32_t table_width;
  int32_t page_size;   // a multiple of 16; 1 with GATHER
  int32_t box_rows;    // 16, 32 or 64: divides page_size
  int32_t cache_rows;  // pages * page_size
  float softmax_scale;
};

struct Stage {
  uint8_t latent[kLatentTiles][kTileBytes];
  uint8_t rope[kTileBytes];
  uint8_t scale[kKeys * kScaleBytes];
};

// Where a warpgroup is in its share.
struct Place {
  Bound at;
  Segment segment;
  bool more;
};

struct Shared {
  uint8_t q[kQueryTiles][kTileBytes];
  Stage stage[kStages];
  uint8_t weights[2][kTileBytes];  // in turns: [row, 128], of a block of either warpgroup, 64 bytes each
  float fade[2][kRows];            // what sums are multiplied by before the warpgroup's block is added
  float most[kRows];               // log2 scale of the weights of the last block
  float sum[2][2][kRows];          // of the segment, in turns: weights of either warpgroup's blocks
  int32_t fades[2][4];             // whether a factor of the warp's rows is not 1
  Place walk[2];
  uint64_t full[kStages], empty[kStages];
  uint64_t q_full, q_empty;
};

// Stages in turns.
struct Turn {
  int index = 0;
  uint32_t parity = 0;

  EPRT_DEVICE void advance() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

EPRT_DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

EPRT_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

// Arrives at the same barrier of block `rank` of the cluster.
EPRT_DEVICE void barrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [at]; }" ::"r"(
          shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// The box that begins at tile `tile` of row `row`, tile by tile.
EPRT_DEVICE void load_tiles(void* to, const TensorMap* map, int row, int tile, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared_address(to)),
      "l"(map), "r"(0), "r"(row), "r"(tile), "r"(shared_address(barrier))
      : "memory");
}

// The same, to all thread blocks of the cluster.
EPRT_DEVICE void load_tiles_for_all(void* to, const TensorMap* map, int row, int tile, uint64_t* barrier) {
  if (kCtas == 1) return load_tiles(to, map, row, tile, barrier);
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(row), "r"(tile), "r"(shared_address(barrier)), "h"(uint16_t((1 << kCtas) - 1))
      : "memory");
}

// Called by one thread. Each of two thread blocks loads half of the latents, and in turns the rest, for both.
template <int kPerBlock>
EPRT_DEVICE void load_stage(const MlaDecodeFp8Params& p, Stage& to, uint64_t* full, int rank, bool even,
                            const int (&row)[kPerBlock]) {
  constexpr int kBoxRows = kKeys / kPerBlock, kBoxBytes = kTileBytes / kPerBlock;
  barrier_expect(full, sizeof(Stage));
#pragma unroll
  for (int box = 0; box < kPerBlock; ++box) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kCtas > 1 && rank != half) continue;
      if (kPerBlock == 1) {
        load_tiles_for_all(to.latent[2 * half], &p.latent, row[box], 2 * half, full);
      } else {
#pragma unroll
        for (int k = 2 * half; k < 2 * half + 2; ++k)
          load_tiles_for_all(to.latent[k] + box * kBoxBytes, &p.rope, row[box], k, full);
      }
    }
    if (kCtas == 1 || rank == int(even))
      load_tiles_for_all(to.rope + box * kBoxBytes, &p.rope, row[box], kLatentTiles, full);
    if (kCtas == 1 || rank != int(even))
      load_tiles_for_all(to.scale + box * kBoxRows * kScaleBytes, &p.scale, row[box], 0, full);
  }
}

// Called by one warp.
template <int kPerBlock>
EPRT_DEVICE void load(const MlaDecodeFp8Params& p, Shared& s, int share, int rank) {
  const bool leader = threadIdx.x % kWarp == 0;
  uint32_t segments = 0;
  Turn stage;
  Walk walk(p.all, p.bound, share);
  Segment segment;
  while (walk.next(segment)) {
    const int count = segment.end - segment.begin;
    if (count == 0) continue;
    Boxes<kPerBlock, MlaDecodeFp8Params> boxes(p, segment);
    barrier_wait(&s.q_empty, ~segments & 1);
    if (leader) {
      const int first = segment.request.first_token * p.all.heads + segment.group * kGroupRows + rank * kRows;
      barrier_expect(&s.q_full, sizeof(s.q));
      load_tiles(s.q, &p.q, first, 0, &s.q_full);
    }
    ++segments;
    for (int i = 0; i < count; ++i, stage.advance()) {
      boxes.pass(i * kPerBlock);
      int row[kPerBlock];
#pragma unroll
      for (int box = 0; box < kPerBlock; ++box) row[box] = boxes.row_of(i * kPerBlock + box);
      barrier_wait(&s.empty[stage.index], ~stage.parity & 1);
      if (leader) load_stage(p, s.stage[stage.index], &s.full[stage.index], rank, i % 2 == 0, row);
    }
  }
}

// The same for pages of one token, by all threads of a warpgroup.
EPRT_DEVICE void gather(const MlaDecodeFp8Params& p, Shared& s, int share, int rank) {
  constexpr int kEntryBytes = (kLatentTiles + 1) * 128 + kScaleBytes;
  uint32_t segments = 0;
  Turn stage;
  Walk walk(p.all, p.bound, share);
  Segment segment;
  while (walk.next(segment)) {
    if (segment.begin == segment.end) continue;
    const int32_t* slots = p.page_table + int64_t(segment.index) * p.table_width;
    Gathered<kEntryBytes> entries(p.entries, slots, segment.request.length, segment.begin);
    barrier_wait(&s.q_empty, ~segments & 1);
    if (threadIdx.x == kConsumers) {
      const int first = segment.request.first_token * p.all.heads + segment.group * kGroupRows + rank * kRows;
      barrier_expect(&s.q_full, sizeof(s.q));
      load_tiles(s.q, &p.q, first, 0, &s.q_full);
    }
    ++segments;
    for (int block = segment.begin; block < segment.end; ++block, stage.advance()) {
      Stage& to = s.stage[stage.index];
      entries.begin(block);
      barrier_wait(&s.empty[stage.index], ~stage.parity & 1);
#pragma unroll
      for (int tile = 0; tile < kLatentTiles; ++tile) entries.copy_tile(to.latent[tile], 128 * tile);
      entries.copy_tile(to.rope, 128 * kLatentTiles);
      entries.copy_pieces(to.scale, 128 * (kLatentTiles + 1));
      arrive_when_copied(&s.full[stage.index]);
    }
  }
}

}  // namespace eprt
