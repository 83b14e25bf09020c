// Low-latency dispatch, sending side: a token goes once to each rank that holds one of its slots, optionally cast to
// fp8. The counts leave before the values, so that they need not wait behind them on the link; the headers, which take
// longer, leave after them.
#pragma once
#include "cast.cuh"
#include "low_latency_dispatch.cuh"
#include "low_latency_layered.cuh"

namespace eprt::low_latency {

// ---- routing --------------------------------------------------------------------------------------------------------
//
// Every thread block reads the routing of the whole batch, so it numbers its entries without communication.

struct Routing {   // in shared memory
  int16_t* entry;  // [T * K]: rank << 10 | local slot (at most 32 ranks of 1024 slots), or -1; padded to whole vectors
  int num_tokens;

  EPRT_DEVICE Routing(const DispatchParams& p, uint8_t* smem)
      : entry(reinterpret_cast<int16_t*>(smem)), num_tokens(p.num_tokens) {}
  EPRT_DEVICE uint8_t* end() const { return reinterpret_cast<uint8_t*>(entry + ceil_div(num_tokens * kTopk, 8) * 8); }
};

constexpr int kSlotLoads = 2;  // entries that a thread loads at once

__device__ __noinline__ void report_bad_slot(const Deadline& deadline, int64_t slot, int i) {
  report(deadline.failure, kBadSlot, uint32_t(slot >> 32), uint32_t(slot), i);
}

// Called by the workers. topk_slot of either size is read as 32-bit words, the lower first.
EPRT_DEVICE void read_entries(const DispatchParams& p, const Routing& routing) {
  const int32_t* words = static_cast<const int32_t*>(p.topk_slot);
  const int num_slots = p.context.num_slots, num_entries = p.num_tokens * kTopk, padded = ceil_div(num_entries, 8) * 8;
  const int size = p.slot_bytes / 4;
#pragma unroll 1
  for (int first = threadIdx.x; first < padded; first += kSlotLoads * kThreads) {
    int32_t low[kSlotLoads], high[kSlotLoads];
    // Past the end, load the last entry again: with a branch, each load would be awaited before the next is issued.
#pragma unroll
    for (int j = 0; j < kSlotLoads; ++j) {
      const int32_t* word = words + min(first + j * kThreads, num_entries - 1) * size;
      low[j] = word[0], high[j] = word[size - 1];
    }
#pragma unroll
    for (int j = 0; j < kSlotLoads; ++j) {
      const int i = first + j * kThreads;
      if (i >= padded) continue;
      const bool names_one = i < num_entries && low[j] >= 0 && low[j] < num_slots * kRanks && (size == 1 || !high[j]);
      const int rank = rank_of(low[j], num_slots);
      routing.entry[i] = names_one ? rank << 10 | (low[j] - rank * num_slots) : -1;
      if (!names_one && (low[j] & high[j]) != -1 && i < num_entries && blockIdx.x == 0)
        report_bad_slot(p.context.deadline, size == 1 ? low[j] : int64_t(high[j]) << 32 | uint32_t(low[j]), i);
    }
  }
}

// The ranks that hold a slot of the token, masked ones left out; the same in all lanes.
EPRT_DEVICE uint32_t ranks_of(const Routing& routing, int token, uint32_t masked, int lane) {
  const int entry = lane < kTopk ? routing.entry[token * kTopk + lane] : -1;
  return __reduce_or_sync(kAllLanes, entry >= 0 ? 1u << (entry >> 10) : 0u) & ~masked;
}

// The next rank of a set, from the one after this rank on, so that ranks do not all send to rank 0 first.
EPRT_DEVICE int next_rank(uint32_t ranks, int own) {
  const uint32_t after = ranks & ~((2u << own) - 1);
  return __ffs(after ? after : ranks) - 1;
}

// How many of the first `end` entries equal `entry`. Called by one warp; all lanes get the result.
EPRT_DEVICE int count_entries(const Routing& routing, int entry, int end, int lane) {
  const int whole = end / 8;
  int n = 0;
#pragma unroll 2
  for (int v = lane; v < whole; v += kWarp) {
    const Vec16 eight = reinterpret_cast<const Vec16*>(routing.entry)[v];
#pragma unroll
    for (int j = 0; j < 4; ++j) n += __popc(__vcmpeq2(eight.w[j], entry * 0x10001u));
  }
  n /= 16;  // each equal entry set all 16 of its bits
  if (lane < end % 8) n += routing.entry[whole * 8 + lane] == entry;
  return __reduce_add_sync(kAllLanes, n);
}

// Which of the token's combine rows `rank` fills: row `rank`, or that of the first k whose slot lies on `rank`.
EPRT_DEVICE int combine_row(const Routing& routing, int token, int rank) {
  if (kRowIsRank) return rank EPRT_WIRED(% kRowRanks);
  int row = 0;
  for (int k = kTopk - 1; k >= 0; --k)
    if (routing.entry[token * kTopk + k] >= 0 && routing.entry[token * kTopk + k] >> 10 == rank) row = k;
  return row;
}

// ---- values ---------------------------------------------------------------------------------------------------------

constexpr int kChunks = ceil_div(kPayloadLines, kChunkLines);
constexpr int kQuads = kChunkLines / kWarpLines;  // instructions with which a warp stores a chunk
#ifndef SEND_WARPS
#define SEND_WARPS 16
#endif

// A chunk of a token's values as it lies in global memory: what the lane casts to its vectors, or sends.
struct Chunk {
  Unit unit[kQuads];  // bf16 payload: only `lo`
};

// unit: token * kChunks + chunk. Past the last vector of a token, loads that one again; it is not sent.
EPRT_DEVICE void load_chunk(const DispatchParams& p, int unit, int lane, Chunk& chunk) {
  if (unit >= p.num_tokens * kChunks) return;
  const uint8_t* x = p.x + int64_t(unit / kChunks) * kHidden * 2;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int v = min(unit % kChunks * kChunkVectors + vector_of_lane(q, lane), kPayloadVectors - 1);
    if (kFp8)
      chunk.unit[q] = {load_streaming(x + v * 32), load_streaming(x + v * 32 + 16)};
    else
      chunk.unit[q].lo = load_streaming(x + v * 16);
  }
}

// One warp's. magnitudes: in shared memory, floats: the largest one of each vector of the chunk.
EPRT_DEVICE void cast_chunk(const Chunk& chunk, int number, bool ue8m0, uint32_t epoch, Vec16* magnitudes, int lane,
                            Vec16 (&line)[kQuads]) {
  float* magnitude = reinterpret_cast<float*>(magnitudes);
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int v = vector_of_lane(q, lane);
    if (!ends_line(lane))
      magnitude[v] = number * kChunkVectors + v < kPayloadVectors ? largest_magnitude(chunk.unit[q]) : 0.f;
  }
  __syncwarp();
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const int group =
        ends_line(lane) ? min(q * kWarpLines + lane / kLineLanes, kChunkScales - 1) : vector_of_lane(q, lane) / 8;
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Vec16 four = magnitudes[group * 2 + i];
#pragma unroll
      for (int j = 0; j < 4; ++j) largest = fmaxf(largest, __uint_as_float(four.w[j]));
    }
    const Fp8Scale s = fp8_scale(largest, ue8m0);
    line[q] = ends_line(lane) ? Vec16{{__float_as_uint(s.scale), 0, 0, epoch}} : cast_to_fp8(chunk.unit[q], s.factor);
  }
  __syncwarp();
}

// The first unit, token * kChunks + chunk, of a warp that sends values.
EPRT_DEVICE int first_unit() { return blockIdx.x + threadIdx.x / kWarp * gridDim.x; }

EPRT_DEVICE void to_lines(const DispatchParams& p, const Chunk& chunk, int unit, uint32_t epoch, Vec16* magnitudes,
                          int lane, Vec16 (&line)[kQuads]) {
  if (kFp8) return cast_chunk(chunk, unit % kChunks, p.scale_format != kFloat, epoch, magnitudes, lane, line);
#pragma unroll
  for (int q = 0; q < kQuads; ++q) line[q] = ends_line(lane) ? Vec16{{0, 0, 0, epoch}} : chunk.unit[q].lo;
}

// Sends the values of all tokens, a chunk a warp. line: of the warp's first chunk.
EPRT_DEVICE void send_values(const DispatchParams& p, const Routing& routing, const Begun& begun, Vec16 (&line)[kQuads],
                             Vec16* magnitudes, int lane) {
  const Context& c = p.context;
  const int num_units = p.num_tokens * kChunks, stride = gridDim.x * kWarps;
  for (int unit = first_unit(); unit < num_units; unit += stride) {
    const int token = unit / kChunks, number = unit % kChunks;
    Chunk next;
    load_chunk(p, unit + stride, lane, next);  // in flight while this one is sent
    uint32_t left = ranks_of(routing, token, begun.masked, lane);
    EPRT_WIRED(left = copies_to(c, left); const uint32_t ranks = left;)
    while (left) {
      const int r = next_rank(left, c.rank);
      left &= ~(1u << r);
      uint8_t* to = message_at(c, r, begun.epoch, c.rank, token) + kHeaderLines * kLineBytes;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int first = number * kChunkLines + q * kWarpLines;
        store_line(first + lane / kLineLanes < kPayloadLines ? to + first * kLineBytes + lane * 16 : nullptr, line[q]);
      }
    }
    EPRT_WIRED(ship_copies(c, ranks, begun.masked, begun.epoch, token, kChunks + kGroupWarps, lane);)
    if (unit + stride < num_units) to_lines(p, next, unit + stride, begun.epoch, magnitudes, lane, line);
  }
}

// ---- headers --------------------------------------------------------------------------------------------------------

// The two entries of a header line that the lane holds, if it holds any.
EPRT_DEVICE int header_entry(int lane) { return lane / kLineLanes * kHeaderEntries + lane % kLineLanes * 2; }

struct PairWeights {
  float weight[2] = {};

  EPRT_DEVICE void load(const DispatchParams& p, int token, int lane) {
    if (!p.topk_weight || token >= p.num_tokens || ends_line(lane)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (header_entry(lane) + i < kTopk) weight[i] = p.topk_weight[token * kTopk + header_entry(lane) + i];
  }
};

#ifdef NODE_RANKS
// An entry of a message for the whole node of rank r: in its upper bits, which rank of the node has the slot.
EPRT_DEVICE uint32_t node_entry(int entry, int r, uint32_t masked, const int* index, int k) {
  const int rank = entry >> 10;
  if (entry < 0 || !((ranks_of_node(r) & ~masked) >> rank & 1)) return uint32_t(-1);
  return uint32_t(rank % kNodeRanks) << kEntryRankShift | uint32_t(entry & 1023) << 16 | uint32_t(index[k]);
}
#endif

// Sends a token's header to its ranks. index: of each entry, earlier entries of the same slot. Called by all warps of a
// group, which take the ranks in turn.
EPRT_DEVICE void send_header(const DispatchParams& p, const Routing& routing, const Begun& begun, int token,
                             const int* index, const PairWeights& weights, int group_warp, int lane) {
  const Context& c = p.context;
  uint32_t ranks = ranks_of(routing, token, begun.masked, lane);
  EPRT_WIRED(ranks = copies_to(c, ranks);)
  int n = 0;
  for (uint32_t left = ranks; left; left &= left - 1, ++n) {
    if (n % kGroupWarps != group_warp) continue;
    const int r = __ffs(left) - 1;
    Vec16 line;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = header_entry(lane) + i;
      const int entry = !ends_line(lane) && k < kTopk ? routing.entry[token * kTopk + k] : -1;
      line.w[2 * i] = uint32_t(entry >= 0 && entry >> 10 == r ? (entry & 1023) << 16 | index[k] : -1);
      EPRT_WIRED(if (kLayered && is_beyond(c, r)) line.w[2 * i] = node_entry(entry, r, begun.masked, index, k);)
      line.w[2 * i + 1] = __float_as_uint(weights.weight[i]);
    }
    if (ends_line(lane)) line = {{uint32_t(combine_row(routing, token, r)), 0, 0, begun.epoch}};
    uint8_t* to = message_at(c, r, begun.epoch, c.rank, token);
    store_line(lane / kLineLanes < kHeaderLines ? to + lane * 16 : nullptr, line);
  }
  EPRT_WIRED(ship_copies(c, ranks, begun.masked, begun.epoch, token, kChunks + kGroupWarps, lane);)
}

// index: in shared memory, [2][K] of the group, used in turn.
EPRT_DEVICE void send_headers(const DispatchParams& p, const Routing& routing, const Begun& begun, PairWeights weights,
                              int (*index)[kTopk], int lane) {
  const int group = threadIdx.x / kGroupThreads, group_warp = threadIdx.x % kGroupThreads / kWarp;
  const int step = gridDim.x * kGroups;
  int turn = 0;
  for (int token = blockIdx.x + group * gridDim.x; token < p.num_tokens; token += step, turn ^= 1) {
    for (int k = group_warp; k < kTopk; k += kGroupWarps) {
      const int i = token * kTopk + k, entry = routing.entry[i];
      const int earlier = entry < 0 ? 0 : count_entries(routing, entry, i, lane);
      if (lane == 0) index[turn][k] = earlier;
    }
    barrier_sync(kGroup + group, kGroupThreads);
    const PairWeights now = weights;
    weights.load(p, token + step, lane);
    send_header(p, routing, begun, token, index[turn], now, group_warp, lane);
  }
}

// ---- counts ---------------------------------------------------------------------------------------------------------

// A bit for each token of a word's 32 that goes to the rank. Called by one warp; all lanes get the result.
EPRT_DEVICE uint32_t tokens_to(const Routing& routing, int rank, int word, int lane) {
  const int token = word * kWarp + lane;
  bool goes = false;
  for (int k = 0; k < kTopk && token < routing.num_tokens; ++k)
    goes |= routing.entry[token * kTopk + k] >> 10 == rank;  // -1 matches no rank
  return __ballot_sync(kAllLanes, goes);
}

#ifdef NODE_RANKS
// LAYERED: the words that follow in the counts for rank r: which tokens go to its node, then who hands them on there.
EPRT_DEVICE uint32_t node_word(const Context& c, const Routing& routing, const Begun& begun, int r, int word,
                               int lane) {
  if (word == node_words(c) - 1) return named_in_node(c, r, begun.masked);
  uint32_t tokens = 0;
  for (uint32_t left = ranks_of_node(r) & ~begun.masked; left; left &= left - 1)
    tokens |= tokens_to(routing, __ffs(left) - 1, word, lane);
  return tokens;
}
#endif

// Tells each rank how many rows this rank sends to each of its slots, and which tokens it sends, in words that hold the
// epoch, which need no fence and no flag. Called by the placing threads, a warp per word.
EPRT_DEVICE void send_counts(const DispatchParams& p, const Routing& routing, const Begun& begun, int thread) {
  constexpr int kPlaceWarps = kPlaceThreads / kWarp;
  const Context& c = p.context;
  const int lane = thread % kWarp, width = count_words(c), stride = int(gridDim.x) * kPlaceWarps;
  for (int word = blockIdx.x + thread / kWarp * gridDim.x; word < kRanks * width; word += stride) {
    const int r = word / width, e = word % width, t = e - c.num_slots;
    if ((begun.masked >> r) & 1) continue;
    EPRT_WIRED(const int more = t - (width - c.num_slots - node_words(c)); if (more >= 0) {
      const uint32_t n = node_word(c, routing, begun, r, more, lane);
      if (lane == 0) store_relaxed(count_at(c, r, begun.epoch, c.rank) + e, uint64_t(begun.epoch) << 32 | n);
      continue;
    })
    const uint32_t n =
        t < 0 ? count_entries(routing, r << 10 | e, p.num_tokens * kTopk, lane) : tokens_to(routing, r, t, lane);
    if (lane != 0) continue;
    store_relaxed(count_at(c, r, begun.epoch, c.rank) + e, uint64_t(begun.epoch) << 32 | n);
    if (kStats && t >= 0 && n) add_to_total(c.stats.tokens + r, int64_t(__popc(n)));
  }
  EPRT_WIRED(ship_counts(c, begun.masked, begun.epoch, stride, lane);)
}

// What the workers do. They read the routing for all threads.
EPRT_DEVICE void send(const DispatchParams& p, const Routing& routing, const Begun& begun, int (*index)[2][kTopk],
                      Vec16 (*magnitudes)[kChunkVectors / 4]) {
  const int group = threadIdx.x / kGroupThreads, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  // Issue the first loads of global memory together; at the same time the placing threads load epoch and mask.
  Chunk chunk;
  load_chunk(p, first_unit(), lane, chunk);
  PairWeights weights;
  weights.load(p, blockIdx.x + group * gridDim.x, lane);
  read_entries(p, routing);
  sync_begun();
  stamp(p.context, 1);
  Vec16 line[kQuads];
  to_lines(p, chunk, first_unit(), begun.epoch, magnitudes[warp], lane, line);
  barrier_sync(kCounted, kAllThreads);
  stamp(p.context, 4);
  send_values(p, routing, begun, line, magnitudes[warp], lane);
  send_headers(p, routing, begun, weights, index[group], lane);
  stamp(p.context, 3);
}

}  // namespace eprt::low_latency
