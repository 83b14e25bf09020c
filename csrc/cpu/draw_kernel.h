// One draw per row, written once against Vec and included once per instruction set. Each row is computed alone.
//
// The vocabulary is not sorted: weights fall into buckets by their leading bits, and only the bucket in which top_k or
// top_p ends is sorted. A row reads its logits once and uses one row of scratch, so it evicts little from the caches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "cpu/buffer.h"
#include "cpu/draw.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace eprt {
namespace {

// Weights are probabilities divided by the largest one, so they lie in 0..1. Exponent and four bits of mantissa give
// the bucket.
constexpr int kBucketShift = 19;
constexpr int kNumBuckets = (0x3f800000 >> kBucketShift) + 1;
constexpr int64_t kBlock = 64;  // weights summed at once when drawing
constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

inline int bucket_of(float weight) {
  return min_of(static_cast<int>(bits_of(weight) >> kBucketShift), kNumBuckets - 1);
}

// Keeps the weights above `weight`, and those equal to it up to index `last`; `mass` is their sum.
struct Cut {
  float weight;
  int64_t last;
  double mass;
};

struct Candidate {
  float weight;
  int64_t index;
};

class Histogram {
 public:
  Histogram(const float* weights, int64_t n) : weights_(weights), n_(n) {
    std::memset(count_, 0, sizeof(count_));
    std::memset(mass_, 0, sizeof(mass_));
    for (int64_t i = 0; i < n; ++i) {
      const int bucket = bucket_of(weights[i]);
      count_[bucket] += weights[i] > 0;
      mass_[bucket] += weights[i];
    }
  }

  // The largest weights, lower indices first among equals: at most `count`, and no more than are needed to reach
  // `mass`.
  Cut cut(int64_t count, double mass, Candidate* scratch) const {
    double reached = 0;
    for (int bucket = kNumBuckets - 1; bucket >= 0; --bucket) {
      if (count_[bucket] >= count || reached + mass_[bucket] >= mass) {
        const Cut inside = cut_inside(bucket, count, mass, reached, scratch);
        if (inside.last >= 0) return inside;
      }
      count -= count_[bucket];
      reached += mass_[bucket];
    }
    return {0, n_, reached};
  }

 private:
  // last is -1 if, due to rounding, the sum of the bucket's weights stays below `mass`.
  Cut cut_inside(int bucket, int64_t count, double mass, double reached, Candidate* scratch) const {
    int64_t num = 0;
    for (int64_t i = 0; i < n_; ++i) {
      if (weights_[i] > 0 && bucket_of(weights_[i]) == bucket) scratch[num++] = {weights_[i], i};
    }
    std::sort(scratch, scratch + num, [](const Candidate& a, const Candidate& b) {
      return a.weight > b.weight || (a.weight == b.weight && a.index < b.index);
    });
    for (int64_t i = 0; i < num; ++i) {
      reached += scratch[i].weight;
      if (i + 1 >= count || reached >= mass) return {scratch[i].weight, scratch[i].index, reached};
    }
    return {0, -1, reached};
  }

  const float* weights_;
  int64_t n_;
  int64_t count_[kNumBuckets];
  double mass_[kNumBuckets];
};

// weights = exp((logits - largest) / temperature). Subtracted before the division, so that a tiny temperature
// underflows to 0 instead of giving inf / inf.
inline void weigh(const float* logits, float temperature, int64_t n, float* weights) {
  float largest = logits[0];
  int64_t i = 0;
  if (n >= Vec::kWidth) {
    Vec most = load(logits);
    for (i = Vec::kWidth; i + Vec::kWidth <= n; i += Vec::kWidth) most = max(most, load(logits + i));
    largest = reduce_max(most);
  }
  for (; i < n; ++i) largest = max_of(largest, logits[i]);
  const Vec top = set1(largest), scale = set1(temperature), log2e = set1(kLog2E);
  for (i = 0; i + Vec::kWidth <= n; i += Vec::kWidth) {
    store(weights + i, exp2((load(logits + i) - top) / scale * log2e));
  }
  const int rest = static_cast<int>(n - i);
  if (rest) store_n(weights + i, exp2((load_n(logits + i, rest) - top) / scale * log2e), rest);
}

inline void truncate(float* weights, int64_t n, int64_t top_k, double top_p, Candidate* scratch) {
  const Histogram histogram(weights, n);
  Cut cut = histogram.cut(top_k > 0 ? top_k : kNoLimit, std::numeric_limits<double>::infinity(), scratch);
  if (top_p < 1) cut = histogram.cut(top_k > 0 ? top_k : kNoLimit, top_p * cut.mass, scratch);
  for (int64_t i = 0; i < n; ++i) {
    const bool kept = weights[i] > cut.weight || (weights[i] == cut.weight && i <= cut.last);
    weights[i] = kept ? weights[i] : 0.0f;
  }
}

inline double block_mass(const float* weights, int64_t from, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = from; i < min_of(from + kBlock, n); ++i) sum += static_cast<double>(weights[i]);
  return sum;
}

// The first token at which the cumulative weight exceeds u times the sum of all weights; never one of weight 0.
inline int64_t invert(const float* weights, int64_t n, double u) {
  double total = 0;
  for (int64_t block = 0; block < n; block += kBlock) total += block_mass(weights, block, n);
  const double wanted = u * total;
  double before = 0;
  int64_t chosen = -1;
  for (int64_t block = 0; block < n; block += kBlock) {
    const double sum = block_mass(weights, block, n);
    if (before + sum <= wanted && block + kBlock < n) {
      before += sum;
      continue;
    }
    for (int64_t i = block; i < n && before <= wanted; ++i) {
      if (weights[i] > 0) chosen = i;
      before += weights[i];
    }
    break;
  }
  // Rounding may leave the last sum equal to the target, not above it: then the last token with a weight is drawn.
  for (int64_t i = n - 1; i >= 0 && chosen < 0; --i) chosen = weights[i] > 0 ? i : -1;
  return max_of<int64_t>(chosen, 0);
}

inline void draw_any(const DrawArgs& args) {
  std::atomic<int64_t> next{0};
  const int64_t team = min_of<int64_t>(args.rows, max_of(args.num_threads, 1));
  parallel_for(team, args.num_threads, [&](int64_t) {
    Buffer<float> weights(args.vocab);
    Buffer<Candidate> scratch(args.vocab);
    for (int64_t r; (r = next.fetch_add(1, std::memory_order_relaxed)) < args.rows;) {
      weigh(args.logits + args.row[r] * args.logits_row, args.temperature[r], args.vocab, weights.get());
      if (args.min_p[r] > 0) {
        for (int64_t i = 0; i < args.vocab; ++i) {
          if (weights.get()[i] < args.min_p[r]) weights.get()[i] = 0;
        }
      }
      const bool cuts = args.top_p[r] < 1 || (args.top_k[r] > 0 && args.top_k[r] < args.vocab);
      if (cuts) truncate(weights.get(), args.vocab, args.top_k[r], args.top_p[r], scratch.get());
      args.token[r] = invert(weights.get(), args.vocab, args.u[r]);
    }
  });
}

// Of a stretch of a row.
struct Largest {
  float value = -std::numeric_limits<float>::infinity();
  int64_t index = -1;
  bool has_nan = false;
};

inline Largest largest_of(const float* logits, int64_t begin, int64_t end) {
  float most = -std::numeric_limits<float>::infinity();
  int nans = 0;
#pragma omp simd reduction(max : most) reduction(| : nans)
  for (int64_t i = begin; i < end; ++i) {
    most = logits[i] > most ? logits[i] : most;
    nans |= logits[i] != logits[i];
  }
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t block_end = min_of(block + kBlock, end);
    int found = 0;
#pragma omp simd reduction(| : found)
    for (int64_t i = block; i < block_end; ++i) found |= logits[i] == most;
    for (int64_t i = block; found && i < block_end; ++i) {
      if (logits[i] == most) return {most, i, nans != 0};
    }
  }
  return {most, -1, nans != 0};
}

// Rows are cut into stretches, so that one row is enough for several threads.
inline void largest_any(const LargestArgs& args) {
  constexpr int64_t kStretch = 1 << 13;
  const int64_t stretches = div_up(args.vocab, kStretch), count = args.rows * stretches;
  Buffer<Largest> found(count);
  parallel_for(count, count > 4 ? args.num_threads : 1, [&](int64_t i) {
    const int64_t begin = i % stretches * kStretch;
    const float* logits = args.logits + i / stretches * args.logits_row;
    found.get()[i] = largest_of(logits, begin, min_of(begin + kStretch, args.vocab));
  });
  for (int64_t row = 0; row < args.rows; ++row) {
    Largest most;
    for (int64_t i = row * stretches; i < (row + 1) * stretches; ++i) {
      const Largest& next = found.get()[i];
      most.has_nan |= next.has_nan;
      if (next.value > most.value) most.value = next.value, most.index = next.index;
    }
    const bool is_finite = !most.has_nan && most.value <= std::numeric_limits<float>::max();
    args.token[row] = is_finite ? most.index : -1;
  }
}

}  // namespace
}  // namespace eprt
