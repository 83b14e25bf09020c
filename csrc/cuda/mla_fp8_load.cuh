// Loads of mla_decode_fp8.cu: what its thread blocks share, and the warpgroup that copies the entries of chosen tokens.
// A stage is loaded again as soon as all warps of the thread block that read it have released it.
#pragma once
#include "mla_fp8.cuh"
#include "mla_gather.cuh"

namespace eprt {

constexpr int kConsumers = 2 * kWarpgroup;
constexpr int kThreads = kConsumers + kWarpgroup;  // the rest loads
constexpr int kReaders = 8;                        // warps of a thread block that read a stage

using Turn = TurnOf<kStages>;

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

// By all threads of a warpgroup.
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
