// The best top_k of each row of scores, as slots of a paged cache in the order of their positions; of equal scores that
// of the lower position. A thread block, or a cluster of CTAS of them, for each row.
//
// Scores are read once. A sample of the row says which score certainly fewer than a few thousand exceed, and very
// likely top_k do: what reaches it is kept, with its position, in shared memory, and handed to all thread blocks of the
// cluster. Among those the score of the last one chosen is found exactly, digit by digit, with counts of digits. Chosen
// positions become bits; sums of the bits before a word say which slot goes where.
//
// Where the guess was wrong (too many reach it, or too few) or there is no room for it, the digits are counted over the
// whole row instead, by each thread block by itself: slower, with the same result.
//
// Compile-time constants: CTAS (1, 2, 4, 8), THREADS (512 or 1024), WORDS (of 32 positions that a row may have at
// most).
#include "cluster.cuh"
#include "flags.cuh"

namespace eprt {

constexpr int kCtas = CTAS;
constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWords = WORDS;
constexpr int kRoom = 8192;     // scores that may reach the guess
constexpr int kSampled = 8;     // scores of the sample, of a thread: in pieces of 4
constexpr int kPieces = 4;      // of 4 scores, that a lane reads at a time
constexpr int kDigitBits = 12;  // of a key, counted at a time
constexpr int kDigits = 1 << kDigitBits;
constexpr int kMine = kDigits / kThreads;  // digits that a thread sums up
constexpr int kNearBits = 24;  // the last one chosen very likely is less than 2^24 keys (two octaves) above the guess

struct IndexChooseParams {
  const float* score;         // [rows, stride], 16-byte aligned; stride a multiple of 4
  const int32_t* page_table;  // [requests, table_width]
  const int32_t* request;     // [rows]
  const int32_t* length;      // [rows]: scores, at most 32 kWords
  int32_t* slot;              // [rows, top_k]: written; -1 behind the last one chosen
  int64_t stride;
  int32_t table_width;
  int32_t page_size;
  int32_t top_k;
};

// The digit of a key, how many keys have larger ones, and how many the same.
struct Digit {
  uint32_t digit, above, equal;
};

struct Shared {
  uint64_t found[kRoom];      // keys that reach the guess, upper half; positions. The block's own first
  uint32_t bits[kWords];      // of positions
  uint32_t count[kDigits];    // zeros between uses
  uint32_t before[kThreads];  // bits in front of a thread's words
  uint32_t warp_sum[kWarps];
  Digit digit;
  uint32_t num_found;
};

// What lies at the same place in block `rank` of the cluster.
EPRT_DEVICE uint64_t load_at(const uint64_t* mine, int rank) {
  uint64_t v;
  asm volatile("{ .reg .b32 at; mapa.shared::cluster.u32 at, %1, %2; ld.shared::cluster.u64 %0, [at]; }"
               : "=l"(v)
               : "r"(shared_address(mine)), "r"(rank)
               : "memory");
  return v;
}

EPRT_DEVICE uint32_t load_at(const uint32_t* mine, int rank) {
  uint32_t v;
  asm volatile("{ .reg .b32 at; mapa.shared::cluster.u32 at, %1, %2; ld.shared::cluster.u32 %0, [at]; }"
               : "=r"(v)
               : "r"(shared_address(mine)), "r"(rank)
               : "memory");
  return v;
}

// ---- keys: whole numbers in the order of scores

// What is not a number is the lowest; -0 equals 0.
EPRT_DEVICE uint32_t key_of(float score) {
  uint32_t bits = __float_as_uint(score);
  if (score != score) bits = 0xff800000u;
  if (score == 0.f) bits = 0;
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// Not a number for keys of none.
EPRT_DEVICE float score_of(uint32_t key) { return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key); }

// ---- sums over the thread block

EPRT_DEVICE uint32_t sum_upto(uint32_t mine) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, mine, step);
    if (lane >= step) mine += before;
  }
  return mine;
}

// Over the threads in front of this one.
EPRT_DEVICE uint32_t sum_before(Shared& s, uint32_t mine) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t upto = sum_upto(mine);
  if (lane == kWarp - 1) s.warp_sum[warp] = upto;
  __syncthreads();
  const uint32_t others = __reduce_add_sync(kAllLanes, lane < warp ? int(s.warp_sum[lane]) : 0);
  __syncthreads();
  return others + upto - mine;
}

// ---- the score of the last one chosen

// The digit of the left-th largest key of those that were counted, which are no fewer.
EPRT_DEVICE Digit find_digit(Shared& s, uint32_t left) {
  __syncthreads();
  const int first = kDigits - (threadIdx.x + 1) * kMine;  // largest digits first
  uint32_t count[kMine], all = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    count[i] = s.count[first + i], s.count[first + i] = 0;
    all += count[i];
  }
  uint32_t above = sum_before(s, all);
  if (above < left && left <= above + all) {
#pragma unroll
    for (int i = kMine - 1; i >= 0; --i) {
      if (above < left && left <= above + count[i]) s.digit = {uint32_t(first + i), above, count[i]};
      above += count[i];
    }
  }
  __syncthreads();
  return s.digit;
}

// The left-th largest of the keys in [low, low + 2^bits); equal: how many keys are it, once bits is 0. open: keys above
// are among them.
struct Range {
  uint32_t low;
  int bits;
  uint32_t left, equal;
  bool open;
};

// Narrows the range by up to kDigitBits bits. each(f): f(key, position) for all of this thread's.
template <class Each>
EPRT_DEVICE void narrow(Shared& s, Range& range, const Each& each) {
  const int shift = max(range.bits - kDigitBits, 0);
  each([&](uint32_t key, int) {
    const uint32_t above = key - range.low, digit = above >> shift;
    if (key < range.low || (!range.open && digit >> (range.bits - shift))) return;
    atomicAdd(&s.count[min(digit, uint32_t(kDigits - 1))], 1u);
  });
  const Digit found = find_digit(s, range.left);
  range.low += found.digit << shift;
  if (range.open && range.bits < 32 && found.digit == kDigits - 1) {  // there, or above
    range.bits = 32;
    return;
  }
  range.left -= found.above, range.equal = found.equal, range.bits = shift, range.open = false;
}

// ---- the guess

// The key that about as many scores reach as are wanted, and some more: in a sample 5 standard deviations more.
EPRT_DEVICE uint32_t guess(const IndexChooseParams& p, Shared& s, const float* score, int length) {
  constexpr int kSample = kSampled * kThreads;
  uint32_t key[kSampled];
#pragma unroll
  for (int piece = 0; piece < kSampled / 4; ++piece) {
    const int64_t place = piece * kThreads + threadIdx.x;
    const int at = int(place * (length / 4) / (kSample / 4)) * 4;
    const Vec16 x = *reinterpret_cast<const Vec16*>(score + at);
#pragma unroll
    for (int e = 0; e < 4; ++e) key[4 * piece + e] = key_of(__uint_as_float(x.w[e]));
  }
  const float expected = float(p.top_k) * kSample / length;
  const uint32_t wanted = uint32_t(expected + 5.f * sqrtf(expected)) + 4;
  Range range{0, 32, min(wanted, uint32_t(kSample)), 0, true};
#pragma unroll 1
  for (int step = 0; step < 2; ++step)
    narrow(s, range, [&](auto f) {
#pragma unroll
      for (int i = 0; i < kSampled; ++i) f(key[i], 0);
    });
  return range.low;
}

// Keeps what reaches the guess of this thread block's part of the row: pieces of it, in turns with the others.
EPRT_DEVICE void collect(Shared& s, const float* score, int length, uint32_t lowest, int rank) {
  constexpr int kOfLane = 4 * kPieces, kOfWarp = kOfLane * kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const float limit = score_of(lowest);
  for (int first = (warp * kCtas + rank) * kOfWarp; first < length; first += kWarps * kCtas * kOfWarp) {
    Vec16 x[kPieces];
    uint32_t reach = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = first + i * 4 * kWarp + lane * 4;
      if (at < length) x[i] = *reinterpret_cast<const Vec16*>(score + at);
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = first + i / 4 * 4 * kWarp + lane * 4 + i % 4;
      if (at < length && !(__uint_as_float(x[i / 4].w[i % 4]) < limit)) reach |= 1u << i;
    }
    const uint32_t mine = __popc(reach), upto = sum_upto(mine);
    uint32_t to = 0;
    if (lane == kWarp - 1 && upto > 0) to = atomicAdd(&s.num_found, upto);
    to = __shfl_sync(kAllLanes, to, kWarp - 1) + upto - mine;
    if (reach == 0) continue;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (!(reach >> i & 1)) continue;
      const int at = first + i / 4 * 4 * kWarp + lane * 4 + i % 4;
      if (to < kRoom) s.found[to] = uint64_t(key_of(__uint_as_float(x[i / 4].w[i % 4]))) << 32 | at;
      ++to;
    }
  }
}

// Brings what the other thread blocks found here, if there is room. How many there are of all.
EPRT_DEVICE uint32_t gather(Shared& s, int rank) {
  if (kCtas == 1) {
    __syncthreads();
    return s.num_found;
  }
  cluster_barrier();
  uint32_t num[kCtas], all = 0;
#pragma unroll
  for (int i = 0; i < kCtas; ++i) all += num[i] = load_at(&s.num_found, (rank + i) % kCtas);
  if (all <= kRoom) {
    uint32_t to = num[0];
#pragma unroll
    for (int i = 1; i < kCtas; ++i) {
      for (uint32_t k = threadIdx.x; k < num[i]; k += kThreads)
        s.found[to + k] = load_at(s.found + k, (rank + i) % kCtas);
      to += num[i];
    }
  }
  cluster_barrier();
  return all;
}

// ---- from chosen positions to slots

struct Words {
  int count, each;  // of the row, of a thread

  EPRT_DEVICE explicit Words(int length)
      : count(ceil_div(length, 32)), each(ceil_div(ceil_div(length, 32), kThreads)) {}
  EPRT_DEVICE int begin(int thread) const { return min(count, thread * each); }
  EPRT_DEVICE int end(int thread) const { return begin(thread + 1); }
};

EPRT_DEVICE uint32_t bits_before(Shared& s, const Words& words) {
  uint32_t mine = 0;
  for (int i = words.begin(threadIdx.x); i < words.end(threadIdx.x); ++i) mine += __popc(s.bits[i]);
  return sum_before(s, mine);
}

EPRT_DEVICE void set_bit(Shared& s, int position) { atomicOr(&s.bits[position / 32], 1u << position % 32); }

// Leaves the first `left` bits.
EPRT_DEVICE void keep_first(Shared& s, const Words& words, uint32_t left) {
  uint32_t before = bits_before(s, words);
  for (int i = words.begin(threadIdx.x); i < words.end(threadIdx.x); ++i) {
    uint32_t rest = s.bits[i];
    const uint32_t all = __popc(rest), kept = before < left ? min(left - before, all) : 0;
    for (uint32_t k = 0; k < kept; ++k) rest &= rest - 1;
    s.bits[i] &= ~rest, before += all;
  }
  __syncthreads();
}

// The position of the k-th bit.
EPRT_DEVICE int position_of(const Shared& s, const Words& words, uint32_t k) {
  int thread = 0;
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2)
    if (s.before[thread + step] <= k) thread += step;
  uint32_t left = k - s.before[thread];
  int word = words.begin(thread);
  for (uint32_t all; left >= (all = __popc(s.bits[word])); ++word) left -= all;
  uint32_t rest = s.bits[word];
  for (; left > 0; --left) rest &= rest - 1;
  return word * 32 + __ffs(rest) - 1;
}

struct Slots {
  const int32_t* pages;
  int page_size;

  EPRT_DEVICE int at(int position) const {
    return __ldg(pages + position / page_size) * page_size + position % page_size;
  }
};

// Chooses the top_k best of the keys that each(f) gives.
template <class Each>
EPRT_DEVICE void choose(const IndexChooseParams& p, Shared& s, int length, Range range, const Each& each) {
  while (range.bits > 0) narrow(s, range, each);
  const Words words(length);
  const uint32_t last = range.low;
  if (range.left < range.equal) {
    each([&](uint32_t key, int position) {
      if (key == last) set_bit(s, position);
    });
    __syncthreads();
    keep_first(s, words, range.left);
  }
  const bool all_equal = range.left == range.equal;
  each([&](uint32_t key, int position) {
    if (key > last || (all_equal && key == last)) set_bit(s, position);
  });
  __syncthreads();
  s.before[threadIdx.x] = bits_before(s, words);
  __syncthreads();
}

__global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1)
    index_choose(const __grid_constant__ IndexChooseParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + (1024 - shared_address(smem) % 1024) % 1024);
  const int row = blockIdx.x / kCtas, rank = kCtas > 1 ? cluster_rank() : 0;
  const int length = p.length[row], top_k = p.top_k;
  const Slots slots{p.page_table + int64_t(p.request[row]) * p.table_width, p.page_size};
  const float* score = p.score + row * p.stride;
  const int first = rank * kThreads + threadIdx.x;
  int32_t* to = p.slot + int64_t(row) * top_k;
  if (length <= top_k) {  // all of them
    for (int k = first; k < top_k; k += kCtas * kThreads) to[k] = k < length ? slots.at(k) : -1;
    return;
  }
  for (int i = threadIdx.x; i < kDigits; i += kThreads) s.count[i] = 0;
  for (int i = threadIdx.x; i < ceil_div(length, 32); i += kThreads) s.bits[i] = 0;
  if (threadIdx.x == 0) s.num_found = 0;
  __syncthreads();
  const uint32_t lowest = length > kRoom ? guess(p, s, score, length) : 0;
  collect(s, score, length, lowest, rank);
  const uint32_t num = gather(s, rank);
  if (num <= kRoom && num >= uint32_t(top_k)) {
    const int bits = lowest > 0 ? kNearBits : 32;
    choose(p, s, length, Range{lowest, bits, uint32_t(top_k), 0, true}, [&](auto f) {
      for (uint32_t i = threadIdx.x; i < num; i += kThreads) f(uint32_t(s.found[i] >> 32), int(uint32_t(s.found[i])));
    });
  } else {
    choose(p, s, length, Range{0, 32, uint32_t(top_k), 0, true}, [&](auto f) {
      for (int i = threadIdx.x; i < length; i += kThreads) f(key_of(score[i]), i);
    });
  }
  const Words words(length);
  for (int k = first; k < top_k; k += kCtas * kThreads) to[k] = slots.at(position_of(s, words, k));
}

}  // namespace eprt
