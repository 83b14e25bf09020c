// What the kernels of latent attention over an fp8 cache share: their argument, and a block of positions in shared
// memory.
//
// An entry of the cache is 512 latents in e4m3, 64 rotated values in bfloat16, the fp32 scale that both were divided
// by, 12 bytes of nothing. A block of positions lies in one of kStages stages, in tiles of 128 bytes of 64 entries.
#pragma once
#include "cluster.cuh"
#include "mla_work.cuh"
#include "tensor_map.cuh"

namespace eprt {

constexpr int kTerms = TERMS;            // e4m3 numbers whose sum is a latent of a query, 1 or 2
constexpr int kTileBytes = kKeys * 128;  // 64 rows
constexpr int kLatentTiles = kLatent / 128;
constexpr int kQueryTiles = kTerms * kLatentTiles + 1;  // the last has the rotated queries
constexpr int kScaleBytes = 16;                         // of an entry, from its scale to its end
constexpr int kStages = kTerms == 1 ? 4 : 3;
constexpr int kWarpgroup = 128;
constexpr float kTop = 5.f, kRise = 3.5f;                                       // log2; their sum is below that of 448
constexpr uint64_t kTileStep = kTileBytes / 16, kColumnStep = 2, kHalfRow = 4;  // in descriptors

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

// Buffers in turns.
template <int kCount>
struct TurnOf {
  int index = 0;
  uint32_t parity = 0;

  EPRT_DEVICE void advance() {
    if (++index == kCount) index = 0, parity ^= 1;
  }
};

EPRT_DEVICE float largest_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

EPRT_DEVICE float sum_of_quad(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// What is the same in all lanes anyway, so that the compiler sees it: such values need no registers of lanes, and
// descriptors of products that are computed from them need not be copied.
EPRT_DEVICE int uniform(int x) { return __shfl_sync(kAllLanes, x, 0); }

}  // namespace eprt
