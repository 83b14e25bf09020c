// Loads of prompt_attention.cu: what its thread blocks share, who computes what, and the warp that keeps keys and
// values on their way.
//
// A tile is kRows new tokens of one request, for one head. Thread blocks take tiles from a counter: some heads at a
// time, so that their keys and values stay in L2, of these the last tiles first, since they see the most positions.
#pragma once
#include "tensor_map.cuh"

namespace eprt {

constexpr int kRows = 128;                         // of queries, in a tile
constexpr int kKeys = 128;                         // positions of a block
constexpr int kRowBytes = 128;                     // of a shared tile of 64 columns
constexpr int kNope = 2, kValue = 2, kScores = 3;  // such tiles: of keys without and with their rotated part, values
constexpr int kHeadTiles = kNope + kValue;         // of a head in kv
constexpr int kTileBytes = 128 * kRowBytes;        // of kRows or kKeys rows
constexpr int kStages = 2;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2 * kWarpgroup;  // threads
constexpr int kThreads = kConsumers + kWarpgroup;

struct PromptParams {
  TensorMap q_nope;            // [tokens, head_tiles of each head], boxes of kRows rows, kNope tiles
  TensorMap q_rope;            // the same, 1 tile
  TensorMap kv;                // [positions, 4 tiles of each head: keys, values], boxes of kKeys rows, 2 tiles
  TensorMap rope;              // [positions, 1 tile]
  const int32_t* query_start;  // [requests + 1]: first token of each
  const int32_t* length;       // [requests]: positions of each, its new tokens included
  int32_t* next;               // the next tile; 0 before
  uint16_t* out;               // bf16 [tokens, heads, 128], out_stride values from token to token
  int64_t out_stride;
  int32_t requests;
  int32_t heads;
  int32_t heads_together;   // whose keys and values stay in L2
  int32_t nope_head_tiles;  // from head to head of q_nope
  int32_t rope_head_tiles;  // the same of q_rope
  float scale;              // of scores
};

// A tile, and what its rows see.
struct Tile {
  int head;         // -1: there are no more tiles
  int first_token;  // of all requests' tokens
  int rows;         // that are the request's
  int begin;        // first position of the request in kv
  int length;       // positions of the request
  int seen;         // positions that the first row sees; each row below it sees one more

  // Blocks of positions that some row sees.
  EPRT_DEVICE int blocks() const { return ceil_div(min(seen + kRows - 1, length), kKeys); }
};

EPRT_DEVICE Tile of_lane(const Tile& mine, int lane) {
  const auto get = [lane](int value) { return __shfl_sync(kAllLanes, value, lane); };
  return {get(mine.head), get(mine.first_token), get(mine.rows), get(mine.begin), get(mine.length), get(mine.seen)};
}

struct Shared {
  uint8_t q[kScores][kTileBytes];
  uint8_t k[kStages][kScores][kTileBytes];
  uint8_t v[kStages][kValue][kTileBytes];
  Tile tile;
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
};

// Rows [row, row + known) of the map, zeros below them. The map has two dimensions of rows, which add up; the first one
// ends after kKeys rows, and a box that begins at its row kKeys - known reads no further.
EPRT_DEVICE void load_known_rows(void* to, const TensorMap* map, int row, int known, int tile, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(kKeys - known), "r"(row + known), "r"(tile), "r"(shared_address(barrier))
      : "memory");
}

// Sum of v over this lane and those in front of it.
EPRT_DEVICE int sum_up_to(int v) {
#pragma unroll
  for (int by = 1; by < kWarp; by *= 2) {
    const int before = __shfl_up_sync(kAllLanes, v, by);
    if (int(threadIdx.x % kWarp) >= by) v += before;
  }
  return v;
}

// Finds tiles by their number. Called by a whole warp.
struct TileList {
  const PromptParams& p;
  int lane, count = 0;  // tiles of a head

  EPRT_DEVICE explicit TileList(const PromptParams& p) : p(p), lane(threadIdx.x % kWarp) {
    for (int first = 0; first < p.requests; first += kWarp) {
      const int b = first + lane, tiles = b < p.requests ? ceil_div(tokens_of(b), kRows) : 0;
      count += __shfl_sync(kAllLanes, sum_up_to(tiles), kWarp - 1);
    }
  }

  EPRT_DEVICE int tokens_of(int b) const { return p.query_start[b + 1] - p.query_start[b]; }

  EPRT_DEVICE Tile take_next() {
    int number = 0;
    if (lane == 0) number = atomicAdd(p.next, 1);
    number = __shfl_sync(kAllLanes, number, 0);
    if (number >= count * p.heads) return Tile{-1};
    const int first_head = number / (count * p.heads_together) * p.heads_together;
    const int heads = min(p.heads_together, p.heads - first_head);
    const int rest = number - first_head * count;
    return find(first_head + rest % heads, count - 1 - rest / heads);
  }

  EPRT_DEVICE Tile find(int head, int number) const {
    int tiles_before = 0, begin = 0;
    for (int first = 0;; first += kWarp) {
      const int b = first + lane, length = b < p.requests ? p.length[b] : 0;
      const int tokens = b < p.requests ? tokens_of(b) : 0;
      const int tiles = sum_up_to(ceil_div(tokens, kRows)), positions = sum_up_to(length);
      const uint32_t found = __ballot_sync(kAllLanes, number < tiles_before + tiles);
      if (found) {
        const int from = __ffs(found) - 1;
        const int row = (number - tiles_before - tiles + ceil_div(tokens, kRows)) * kRows;
        const Tile tile{head,
                        p.query_start[min(b, p.requests - 1)] + row,
                        min(tokens - row, kRows),
                        begin + positions - length,
                        length,
                        length - tokens + row + 1};
        return of_lane(tile, from);
      }
      tiles_before += __shfl_sync(kAllLanes, tiles, kWarp - 1), begin += __shfl_sync(kAllLanes, positions, kWarp - 1);
    }
  }
};

EPRT_DEVICE void load_keys(const PromptParams& p, Shared& s, const Tile& t, int block, uint32_t used) {
  const int stage = used % kStages, row = t.begin + block * kKeys, known = min(kKeys, t.length - block * kKeys);
  barrier_wait(&s.k_empty[stage], ~(used / kStages) & 1);
  barrier_expect(&s.k_full[stage], kScores * kTileBytes);
  load_known_rows(s.k[stage], &p.kv, row, known, kHeadTiles * t.head, &s.k_full[stage]);
  load_known_rows(s.k[stage][kNope], &p.rope, row, known, 0, &s.k_full[stage]);
}

EPRT_DEVICE void load_values(const PromptParams& p, Shared& s, const Tile& t, int block, uint32_t used) {
  const int stage = used % kStages, row = t.begin + block * kKeys, known = min(kKeys, t.length - block * kKeys);
  barrier_wait(&s.v_empty[stage], ~(used / kStages) & 1);
  barrier_expect(&s.v_full[stage], kValue * kTileBytes);
  load_known_rows(s.v[stage], &p.kv, row, known, kHeadTiles * t.head + kNope, &s.v_full[stage]);
}

EPRT_DEVICE void load_queries(const PromptParams& p, Shared& s, const Tile& t, uint32_t tiles) {
  barrier_wait(&s.q_empty, ~tiles & 1);
  s.tile = t;
  if (t.head < 0) return barrier_arrive(&s.q_full);
  barrier_expect(&s.q_full, kScores * kTileBytes);
  load_tiles(s.q, &p.q_nope, t.first_token, t.head * p.nope_head_tiles, &s.q_full);
  load_tiles(s.q[kNope], &p.q_rope, t.first_token, t.head * p.rope_head_tiles, &s.q_full);
}

// Called by one warp.
EPRT_DEVICE void load(const PromptParams& p, Shared& s) {
  const bool leader = threadIdx.x % kWarp == 0;
  TileList tiles(p);
  uint32_t used = 0, number = 0;
  Tile tile = tiles.take_next();
  for (; tile.head >= 0; ++number) {
    const int blocks = tile.blocks();
    if (leader) {
      load_keys(p, s, tile, 0, used);
      load_queries(p, s, tile, number);
      load_values(p, s, tile, 0, used);
    }
    __syncwarp();
    const Tile next = tiles.take_next();
    if (leader)
      for (int i = 1; i < blocks; ++i) {
        load_keys(p, s, tile, i, used + i);
        load_values(p, s, tile, i, used + i);
      }
    __syncwarp();
    used += blocks;
    tile = next;
  }
  if (leader) load_queries(p, s, tile, number);
}

}  // namespace eprt
