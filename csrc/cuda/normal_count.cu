// Normal-mode count, the first step of a dispatch. Each thread block counts chunks of tokens and numbers tokens within
// the chunk. The last block to finish tells every rank how many rows it will get for each of its experts, waits for the
// same from all ranks, and places the rows.
#include "normal.cuh"

namespace eprt::normal {

constexpr int kCountThreads = 512;
constexpr int kCountWarps = kCountThreads / kWarp;

struct CountParams {
  Context context;
  Layout layout;
  const void* topk_slot;       // [T, K]: global slot or -1; or null, and then the next two are given
  const uint8_t* in_rank;      // bool [T, R]: whether the token goes to the rank
  const int32_t* slot_tokens;  // [S]: tokens for each slot
  int32_t* slot_begin;         // [L + 1]: first row of each local slot, and the end
  uint32_t* host;              // host memory: host_ticket (written last), items, rows, rounds, aligned rows per slot
  int32_t room;                // rows that fit here, if known before the count
  int32_t num_tokens;          // T
  int32_t top_k;               // K
  int32_t num_slots;           // S
  int32_t slot_bytes;          // of one topk_slot: 4 or 8
  int32_t alignment;           // of a slot's first row
  int32_t grouped;             // whether rows are grouped by slot
  int32_t chunk_tokens;        // tokens of a chunk
  int32_t num_chunks;
  int32_t num_rounds;    // dispatches that this rank still needs
  uint32_t host_ticket;  // tells the host that this call's words are complete
};

struct SharedCount {
  int32_t* number;  // [S + R]: counts of the chunk so far; later: rows and items of earlier ranks
  int32_t* total;   // [S + R + 1]: counts of all chunks; later: of all ranks, and the most rounds
  uint32_t* ranks;  // [chunk_tokens]: bit r: the token goes to rank r
  int16_t* entry;   // [chunk_tokens * K]: slot or -1
};

EPRT_DEVICE SharedCount carve(const CountParams& p, uint8_t* smem) {
  const int columns = p.num_slots + kRanks;
  SharedCount s;
  s.number = reinterpret_cast<int32_t*>(smem);
  s.total = s.number + columns;
  s.ranks = reinterpret_cast<uint32_t*>(s.total + columns + 1);
  s.entry = reinterpret_cast<int16_t*>(s.ranks + p.chunk_tokens);
  return s;
}

// ---- a chunk --------------------------------------------------------------------------------------------------------

EPRT_DEVICE int read_slot(const CountParams& p, int64_t i) {
  const int64_t slot =
      p.slot_bytes == 8 ? static_cast<const int64_t*>(p.topk_slot)[i] : static_cast<const int32_t*>(p.topk_slot)[i];
  if (slot >= -1 && slot < p.num_slots) return int(slot);
  report(p.context.deadline.failure, kBadSlot, uint32_t(slot >> 32), uint32_t(slot), uint32_t(i));
  return -1;
}

EPRT_DEVICE void read_routing(const CountParams& p, const SharedCount& s, int first, int count) {
  if (p.topk_slot)
    for (int i = threadIdx.x; i < count * p.top_k; i += kCountThreads)
      s.entry[i] = read_slot(p, int64_t(first) * p.top_k + i);
  __syncthreads();
  const int slots_per_rank = p.num_slots / kRanks;
  for (int t = threadIdx.x; t < count; t += kCountThreads) {
    uint32_t ranks = 0;
    for (int k = 0; p.topk_slot && k < p.top_k; ++k)
      if (s.entry[t * p.top_k + k] >= 0) ranks |= 1u << (s.entry[t * p.top_k + k] / slots_per_rank);
    for (int r = 0; !p.topk_slot && r < kRanks; ++r)
      if (p.in_rank[int64_t(first + t) * kRanks + r]) ranks |= 1u << r;
    s.ranks[t] = ranks;
  }
}

// One warp: numbers the chunk's tokens for each rank, 32 tokens at a time.
EPRT_DEVICE void number_tokens(const CountParams& p, const SharedCount& s, int first, int count, int lane) {
  int32_t* number = s.number + p.num_slots;
  for (int t = lane; t - lane < count; t += kWarp) {
    const uint32_t ranks = t < count ? s.ranks[t] : 0;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const uint32_t tokens = __ballot_sync(kAllLanes, (ranks >> r) & 1);
      const int before = number[r];
      __syncwarp();
      if (lane == 0) number[r] = before + __popc(tokens);
      if (t >= count) continue;
      const int index = before + __popc(tokens & ((1u << lane) - 1));
      p.layout.rank_index[int64_t(first + t) * kRanks + r] = (ranks >> r) & 1 ? index : -1;
    }
    __syncwarp();
  }
}

// One warp: numbers the chunk's entries for each slot, 32 entries at a time.
EPRT_DEVICE void number_entries(const CountParams& p, const SharedCount& s, int first, int count, int lane) {
  const int num_entries = count * p.top_k;
  for (int i = lane; i - lane < num_entries; i += kWarp) {
    const int slot = i < num_entries ? s.entry[i] : -1;
    const uint32_t same = __match_any_sync(kAllLanes, slot);
    const int before = slot >= 0 ? s.number[slot] : 0, index = __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (slot >= 0 && index == 0) s.number[slot] = before + __popc(same);
    if (i < num_entries) p.layout.slot_index[int64_t(first) * p.top_k + i] = before + index;
    __syncwarp();
  }
}

EPRT_DEVICE void count_chunk(const CountParams& p, const SharedCount& s, int chunk) {
  const int first = chunk * p.chunk_tokens, count = min(p.chunk_tokens, p.num_tokens - first);
  const int columns = p.num_slots + kRanks, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int j = threadIdx.x; j < columns; j += kCountThreads) s.number[j] = 0;
  read_routing(p, s, first, count);
  __syncthreads();
  if (warp == 0) number_tokens(p, s, first, count, lane);
  if (warp == 1 && p.grouped) number_entries(p, s, first, count, lane);
  if (warp >= 1 && !p.grouped && p.topk_slot)  // counts suffice, entries need no numbers
    for (int i = threadIdx.x - kWarp; i < count * p.top_k; i += kCountThreads - kWarp)
      if (s.entry[i] >= 0) atomicAdd(s.number + s.entry[i], 1);
  __syncthreads();
  for (int j = threadIdx.x; j < columns; j += kCountThreads)
    p.layout.chunk_first[int64_t(chunk) * columns + j] = s.number[j];
  __syncthreads();
}

// ---- all chunks, all ranks: the last thread block -------------------------------------------------------------------

EPRT_DEVICE bool last_block(const Context& c) {
  __shared__ bool last;
  __syncthreads();  // orders the block's stores before the ticket (cumulativity)
  if (threadIdx.x == 0) {
    last = fetch_add_acq_rel(c.done, 1) == int(gridDim.x) - 1;
    if (last) *c.done = 0;
  }
  __syncthreads();
  return last;
}

// Replaces each chunk's counts by the sums over earlier chunks; the sums over all go to s.total.
EPRT_DEVICE void sum_chunks(const CountParams& p, const SharedCount& s) {
  constexpr int kBatch = 8;  // loads in flight
  const int columns = p.num_slots + kRanks;
  for (int j = threadIdx.x; j < columns; j += kCountThreads) {
    int32_t* column = p.layout.chunk_first + j;
    int sum = 0;
    for (int chunk = 0; chunk < p.num_chunks; chunk += kBatch) {
      int counts[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        counts[i] = chunk + i < p.num_chunks ? __ldcg(column + int64_t(chunk + i) * columns) : 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (chunk + i < p.num_chunks) column[int64_t(chunk + i) * columns] = sum;
        sum += counts[i];
      }
    }
    s.total[j] = p.slot_tokens && j < p.num_slots ? p.slot_tokens[j] : sum;
  }
  if (threadIdx.x == 0) s.total[columns] = p.num_rounds;
  __syncthreads();
}

EPRT_DEVICE void send_counts(const CountParams& p, const SharedCount& s, uint32_t epoch) {
  const Context& c = p.context;
  const int words = p.num_slots + kRanks + 1;
  for (int i = threadIdx.x; i < words * kRanks; i += kCountThreads) {
    const int peer = (c.rank + 1 + i / words) % kRanks, j = i % words;
    if (!load_relaxed(c.deadline.mask + peer))
      store_relaxed(count_at(c, peer, epoch, c.rank) + j, word(epoch, s.total[j]));
  }
  if (kStats && threadIdx.x < kRanks && !load_relaxed(c.deadline.mask + threadIdx.x))
    c.stats.tokens[threadIdx.x] += s.total[p.num_slots + threadIdx.x];
  __syncthreads();
}

// Adds up the counts of all ranks in s.total and of those before this one in s.number. The last of s.total becomes the
// maximum of rounds.
EPRT_DEVICE void receive_counts(const CountParams& p, const SharedCount& s, WaitBook* book, uint32_t epoch) {
  const Context& c = p.context;
  const int columns = p.num_slots + kRanks;
  for (int j = threadIdx.x; j <= columns; j += kCountThreads) {
    uint64_t seen[kRanks];
#pragma unroll
    for (int source = 0; source < kRanks; ++source) seen[source] = load_relaxed(count_at(c, c.rank, epoch, source) + j);
    int before = 0, all = 0, most = 0;
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      uint32_t count = uint32_t(seen[source]);
      if (load_relaxed(c.deadline.mask + source) ||
          (uint32_t(seen[source] >> 32) != epoch &&
           !wait_word(c, book, count_at(c, c.rank, epoch, source) + j, epoch, kDispatchCounts, source, &count)))
        count = 0;
      if (source < c.rank) before += count;
      all += count, most = max(most, int(count));
      if (j < p.num_slots || j == columns) continue;
      p.layout.sent[source * kRanks + j - p.num_slots] = count;
      p.layout.sent_through[source * kRanks + j - p.num_slots] = all;
      if (kStats && j == p.num_slots + c.rank) c.stats.tokens[kRanks + source] += count;
    }
    if (j < columns) s.number[j] = before;
    s.total[j] = j < columns ? all : most;
  }
  __syncthreads();
}

// Reports rows that do not fit; their senders leave them out and report them too. end: of the last row for this rank.
EPRT_DEVICE void check_room(const CountParams& p, int end) {
  if (end > p.room) report(p.context.deadline.failure, kOverflow, p.context.rank, end, p.room);
}

// Computes where our rows go: each rank's slots lie one after another, in each slot the sources one after another.
EPRT_DEVICE void place_rows(const CountParams& p, const SharedCount& s, int lane) {
  const int slots_per_rank = p.num_slots / kRanks, rank = p.context.rank;
  for (int r = threadIdx.x / kWarp; r < kRanks; r += kCountWarps) {
    int begin = 0, end = 0;
    for (int first = 0; first < slots_per_rank; first += kWarp) {
      const int e = first + lane, slot = r * slots_per_rank + e;
      const bool inside = e < slots_per_rank;
      const int rows = inside ? s.total[slot] : 0, room = ceil_div(rows, p.alignment) * p.alignment;
      const int my_begin = begin + sum_below(room, lane);
      begin = __shfl_sync(kAllLanes, my_begin + room, kWarp - 1);
      if (!inside) continue;
      p.layout.base[slot] = my_begin + s.number[slot];
      if (r != rank) continue;
      if (rows) end = my_begin + rows;
      p.slot_begin[e] = my_begin;
      p.layout.slot_rows[e] = p.grouped ? min(rows, max(0, p.room - my_begin)) : rows;
    }
    if (p.grouped) end = __reduce_max_sync(kAllLanes, end);
    if (lane != 0) continue;
    p.layout.base[p.num_slots + r] = s.number[p.num_slots + r];
    if (r != rank) continue;
    p.slot_begin[slots_per_rank] = begin;
    check_room(p, p.grouped ? end : s.total[p.num_slots + r]);
  }
  __syncthreads();
}

EPRT_DEVICE void tell_host(const CountParams& p, const SharedCount& s) {
  volatile uint32_t* host = p.host;
  const int slots_per_rank = p.num_slots / kRanks, rank = p.context.rank;
  for (int e = threadIdx.x; e < slots_per_rank; e += kCountThreads)
    host[4 + e] = ceil_div(s.total[rank * slots_per_rank + e], p.alignment) * p.alignment;
  if (threadIdx.x == 0) {
    host[1] = s.total[p.num_slots + rank];
    host[2] = p.grouped ? p.slot_begin[slots_per_rank] : s.total[p.num_slots + rank];
    host[3] = s.total[p.num_slots + kRanks];
    if (kStats) *p.context.stats.calls += 1;
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) host[0] = p.host_ticket;
}

__global__ void __launch_bounds__(512, 1) count(const __grid_constant__ CountParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ WaitBook book;
  __shared__ uint32_t epoch;
  const Context& c = p.context;
  const SharedCount s = carve(p, smem);
  for (int chunk = blockIdx.x; chunk < p.num_chunks; chunk += gridDim.x) count_chunk(p, s, chunk);
  if (!last_block(c)) return;
  if (threadIdx.x == 0) epoch = epoch_after(c.ticket[kCount]++, 2 * c.num_buffers);
  sum_chunks(p, s);
  send_counts(p, s, epoch);
  open_book(&book, true);
  __syncthreads();
  receive_counts(p, s, &book, epoch);
  close_book(c, &book, 0);
  place_rows(p, s, threadIdx.x % kWarp);
  tell_host(p, s);
}

}  // namespace eprt::normal
