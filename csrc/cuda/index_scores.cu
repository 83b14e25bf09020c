// Scores of the indexer over an fp8 cache of keys: sum over heads of weight * relu(query . key), of 64 heads of 128
// values in e4m3. A query's scales lie in its weights.
//
// A thread block has up to kQueries rows of queries that follow each other, and a range of positions. Rows of one
// request share its keys. A warp loads keys in blocks of 64, piece by piece of a page, as they lie in memory.
// Warpgroups take the blocks in turns. Each reads its block's keys into registers, as the left operand of its products,
// and hands the memory back; then it multiplies them by one query's heads after the other, so a key is read once for
// all queries. While it adds up the heads of one query, the products of the next one run.
//
// Compile-time constant: QUERIES (4 or 16).
#include "tensor_map.cuh"
#include "wgmma_bf16.cuh"
#include "wgmma_fp8.cuh"

namespace eprt {

constexpr int kQueries = QUERIES;
constexpr int kHeads = 64, kSize = 128, kEntryBytes = kSize + 4;
constexpr int kKeys = 64;  // of a block
constexpr int kStages = 6;
constexpr int kWarpgroup = 128;
constexpr int kGroups = 3;  // of warps that multiply
constexpr int kConsumers = kGroups * kWarpgroup;
constexpr int kThreads = kConsumers + kWarp;  // the last warp loads
constexpr int kQueryBytes = kHeads * kSize;

struct IndexScoresParams {
  TensorMap query;            // [rows * kHeads, kSize] bytes, boxes of kHeads rows
  const float* weight;        // [rows, kHeads]
  const uint8_t* keys;        // pages of [page_size, kEntryBytes]: e4m3, then an fp32 scale
  const int32_t* page_table;  // [requests, table_width]
  const int32_t* request;     // [rows]
  const int32_t* length;      // [rows]
  float* score;               // [rows, stride]: written up to each row's length
  int64_t stride;
  int64_t key_page;  // bytes from page to page, a multiple of 16
  int32_t rows;
  int32_t table_width;
  int32_t page_size;  // a multiple of 16
  int32_t piece;      // 16, 32 or 64: divides page_size
  int32_t blocks;     // of keys, of a thread block
  int32_t splits;     // of the positions
};

struct Shared {
  uint8_t query[kQueries][kQueryBytes];
  uint8_t keys[kStages][kKeys * kEntryBytes];
  float weight[kQueries][kHeads];
  int32_t length[kQueries];
  uint64_t full[kStages], empty[kStages], q_full;
};

// Rows of one request, of the thread block's; what the longest of them sees of its range of blocks.
struct Segment {
  int first = 0, end = 0;  // rows
  int request, length;
  int begin_block, end_block;

  // Whether there is another one.
  EPRT_DEVICE bool next(const IndexScoresParams& p, int first_row, int split) {
    const int rows = min(kQueries, p.rows - first_row);
    if (end >= rows) return false;
    first = end, request = p.request[first_row + first], length = 0;
    for (; end < rows && p.request[first_row + end] == request; ++end) length = max(length, p.length[first_row + end]);
    begin_block = split * p.blocks;
    end_block = max(begin_block, min(begin_block + p.blocks, ceil_div(length, kKeys)));
    return true;
  }
};

// Stages in turns.
struct Turn {
  int index = 0;
  uint32_t parity = 0;

  EPRT_DEVICE void advance() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

// Called by one warp; each lane loads a piece.
EPRT_DEVICE void load(const IndexScoresParams& p, Shared& s, int first_row, int split) {
  const int lane = threadIdx.x % kWarp, pieces = kKeys / p.piece;
  Turn stage;
  for (Segment segment; segment.next(p, first_row, split);) {
    const int32_t* pages = p.page_table + int64_t(segment.request) * p.table_width;
    for (int block = segment.begin_block; block < segment.end_block; ++block, stage.advance()) {
      const int position = block * kKeys + lane * p.piece;
      const bool mine = lane < pieces && position < segment.length;
      const int64_t page = mine ? __ldg(pages + position / p.page_size) : 0;
      const int known = min(pieces, ceil_div(segment.length - block * kKeys, p.piece));
      barrier_wait(&s.empty[stage.index], ~stage.parity & 1);
      if (lane == 0) barrier_expect(&s.full[stage.index], known * p.piece * kEntryBytes);
      __syncwarp();
      if (mine)
        bulk_load(s.keys[stage.index] + lane * p.piece * kEntryBytes,
                  p.keys + page * p.key_page + position % p.page_size * kEntryBytes, p.piece * kEntryBytes,
                  &s.full[stage.index]);
    }
  }
}

// What a thread has of a block of keys: rows row and row + 8, as the left operand of products; their scales.
struct Keys {
  uint32_t x[4][4];
  float scale[2];

  EPRT_DEVICE void read(const uint8_t* keys, int row, int quad) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(keys + (row + 8 * h) * kEntryBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k][h] = from[8 * k + quad], x[k][2 + h] = from[8 * k + 4 + quad];
      scale[h] = __uint_as_float(from[kSize / 4]);
    }
  }
};

// Products read these registers until here.
EPRT_DEVICE void keep(const Keys& keys) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" ::"r"(keys.x[i / 4][i % 4]));
}

EPRT_DEVICE void start(float (&d)[32], const Keys& keys, const uint8_t* query) {
  const uint64_t heads = operand(query);
  multiply_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply_fp8(d, keys.x[k], heads + 2 * k, k > 0);
  multiply_commit();
}

// The lane's part of a query's scores of its two keys. weight: of the lane's first head.
EPRT_DEVICE void add_heads(float (&sum)[2], const float (&d)[32], const float* weight) {
  sum[0] = sum[1] = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 w = *reinterpret_cast<const float2*>(weight + 8 * j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += fmaxf(d[4 * j + 2 * h], 0.f) * w.x;
      sum[h] += fmaxf(d[4 * j + 2 * h + 1], 0.f) * w.y;
    }
  }
}

// Four lanes have parts of four sums; lane l of them gets the sum l.
EPRT_DEVICE float sum_of_lane(float a, float b, float c, float d, int quad) {
  const bool upper = quad & 2, odd = quad & 1;
  const float low = (upper ? c : a) + __shfl_xor_sync(kAllLanes, upper ? a : c, 2);
  const float high = (upper ? d : b) + __shfl_xor_sync(kAllLanes, upper ? b : d, 2);
  return (odd ? high : low) + __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
}

struct Consumer {
  const IndexScoresParams& p;
  Shared& s;
  int first_row, lane, quad, row;  // row: of a block's keys

  EPRT_DEVICE Consumer(const IndexScoresParams& p, Shared& s, int first_row) : p(p), s(s), first_row(first_row) {
    lane = threadIdx.x % kWarp, quad = lane % 4, row = threadIdx.x % kWarpgroup / kWarp * 16 + lane / 4;
  }

  EPRT_DEVICE const float* weight(int query) const { return s.weight[query] + 2 * quad; }

  EPRT_DEVICE void store(int query, int first, const float (&sum)[2], const Keys& keys) {
    float* to = p.score + int64_t(first_row + query) * p.stride;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = first + row + 8 * h;
      if (position < s.length[query]) to[position] = sum[h] * keys.scale[h];
    }
  }

  // Few queries: one after the other.
  EPRT_DEVICE void score_few(const Keys& keys, const Segment& segment, int first) {
    float d[32], sum[2];
    for (int query = segment.first; query < segment.end; ++query) {
      start(d, keys, s.query[query]);
      multiply_wait();
      hold(d);
      keep(keys);
      add_heads(sum, d, weight(query));
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] = sum_of_lane(sum[h], sum[h], sum[h], sum[h], quad);
      if (quad == 0) store(query, first, sum, keys);
    }
  }

  // Four at a time; those behind the last are the last one again.
  EPRT_DEVICE void score_many(const Keys& keys, const Segment& segment, int first) {
    float d[2][32], part[4][2], sum[2];
    const int last = segment.end - 1;
    start(d[0], keys, s.query[segment.first]);
#pragma unroll 1
    for (int query = segment.first; query <= last; query += 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        start(d[(i + 1) % 2], keys, s.query[min(query + i + 1, last)]);
        multiply_wait_all_but<1>();
        hold(d[i % 2]);
        add_heads(part[i], d[i % 2], weight(min(query + i, last)));
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] = sum_of_lane(part[0][h], part[1][h], part[2][h], part[3][h], quad);
      if (query + quad <= last) store(query + quad, first, sum, keys);
    }
    multiply_wait();
    hold(d[0]);
    keep(keys);
  }

  EPRT_DEVICE void run(int split) {
    const int group = threadIdx.x / kWarpgroup;
    Turn stage;
    int turn = 0;  // whose block is the next
    barrier_wait(&s.q_full, 0);
    for (Segment segment; segment.next(p, first_row, split);)
      for (int block = segment.begin_block; block < segment.end_block; ++block, stage.advance()) {
        const bool mine = turn == group;
        turn = turn + 1 == kGroups ? 0 : turn + 1;
        if (!mine) continue;
        Keys keys;
        barrier_wait(&s.full[stage.index], stage.parity);
        keys.read(s.keys[stage.index], row, quad);
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.empty[stage.index]);
        if (segment.end - segment.first >= 4)
          score_many(keys, segment, block * kKeys);
        else
          score_few(keys, segment, block * kKeys);
      }
  }
};

EPRT_DEVICE void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  bulk_fence_shared();
}

__global__ void __launch_bounds__(kThreads, 1) index_scores(const __grid_constant__ IndexScoresParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + (1024 - shared_address(smem) % 1024) % 1024);
  const int split = blockIdx.x % p.splits, first_row = blockIdx.x / p.splits * kQueries;
  const int rows = min(kQueries, p.rows - first_row);
  int longest = 0;
  for (int i = 0; i < rows; ++i) longest = max(longest, p.length[first_row + i]);
  if (split * p.blocks * kKeys >= longest) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], kWarpgroup / kWarp);
    barrier_init(&s.q_full, 1);
    publish_barriers();
  }
  for (int i = threadIdx.x; i < rows * kHeads; i += kThreads)
    s.weight[i / kHeads][i % kHeads] = p.weight[int64_t(first_row) * kHeads + i];
  for (int i = threadIdx.x; i < rows; i += kThreads) s.length[i] = p.length[first_row + i];
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      barrier_expect(&s.q_full, rows * kQueryBytes);
      for (int i = 0; i < rows; ++i) load_box(s.query[i], &p.query, 0, (first_row + i) * kHeads, &s.q_full);
    }
    __syncwarp();
    load(p, s, first_row, split);
  } else {
    Consumer(p, s, first_row).run(split);
  }
}

}  // namespace eprt
