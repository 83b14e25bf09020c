// Hyper-connections (streams.h), written once against Vec and included once per instruction set.
#pragma once

#include "cpu/buffer.h"
#include "cpu/lane_loop.h"
#include "cpu/streams.h"
#include "cpu/team.h"

namespace eprt {
namespace {

constexpr int64_t kMaxOutputs = kMaxStreams * (2 + kMaxStreams);

inline float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }

// out[k] = factor * (fn[k] . x), four rows of fn at a time.
inline void project(const StreamMixArgs& args, const float* x, float factor, float* out) {
  const int64_t n = args.streams * args.size, outputs = args.outputs();
  for (int64_t first = 0; first < outputs; first += 4) {
    const int count = static_cast<int>(min_of<int64_t>(4, outputs - first));
    const float* fn[4];
    for (int i = 0; i < 4; ++i) fn[i] = args.fn + (first + min_of(i, count - 1)) * n;
    Vec sum[4] = {zero(), zero(), zero(), zero()};
    for_lanes(n, [&](int64_t i, auto load_i, auto) {
      const Vec x_i = load_i(x + i);
      for (int k = 0; k < 4; ++k) sum[k] = fma(x_i, load_i(fn[k] + i), sum[k]);
    });
    for (int k = 0; k < count; ++k) out[first + k] = reduce_add(sum[k]) * factor;
  }
}

// comb: [streams, streams] logits, which become the doubly stochastic weights.
inline void make_stochastic(const StreamMixArgs& args, float* comb) {
  const int64_t m = args.streams;
  for (int64_t j = 0; j < m; ++j) {
    float* row = comb + j * m;
    float most = row[0], sum = 0;
    for (int64_t k = 1; k < m; ++k) most = max_of(most, row[k]);
    for (int64_t k = 0; k < m; ++k) sum += row[k] = __builtin_expf(row[k] - most);
    for (int64_t k = 0; k < m; ++k) row[k] = row[k] / sum + args.eps;
  }
  for (int64_t i = 0; i < args.iterations; ++i) {
    for (int64_t j = 0; i > 0 && j < m; ++j) {
      float sum = args.eps;
      for (int64_t k = 0; k < m; ++k) sum += comb[j * m + k];
      for (int64_t k = 0; k < m; ++k) comb[j * m + k] /= sum;
    }
    for (int64_t k = 0; k < m; ++k) {
      float sum = args.eps;
      for (int64_t j = 0; j < m; ++j) sum += comb[j * m + k];
      for (int64_t j = 0; j < m; ++j) comb[j * m + k] /= sum;
    }
  }
}

// out = sum_j weight[j * step] * x_j
template <class T>
void weigh(const StreamMixArgs& args, const float* x, const float* weight, int64_t step, T* out) {
  for_lanes(args.size, [&](int64_t i, auto load_i, auto store_i) {
    Vec sum = zero();
    for (int64_t j = 0; j < args.streams; ++j) {
      sum = fma(set1(weight[j * step]), load_i(x + j * args.size + i), sum);
    }
    store_i(out + i, sum);
  });
}

template <class T>
void mix_row(const StreamMixArgs& args, int64_t r, float* x) {
  const int64_t m = args.streams, n = m * args.size;
  convert(static_cast<const T*>(args.x) + r * n, n, x);
  Vec squares = zero();
  for_lanes(n, [&](int64_t i, auto load_i, auto) {
    const Vec x_i = load_i(x + i);
    squares = fma(x_i, x_i, squares);
  });
  const float mean = reduce_add(squares) / static_cast<float>(n);
  float p[kMaxOutputs];
  project(args, x, 1.0f / __builtin_sqrtf(mean + args.norm_eps), p);
  for (int64_t k = 0; k < m; ++k) p[k] = sigmoid(p[k] * args.scale[0] + args.base[k]) + args.eps;
  weigh(args, x, p, 1, static_cast<T*>(args.row) + r * args.size);
  if (args.mixed == nullptr) return;
  for (int64_t k = m; k < 2 * m; ++k) {
    args.post[r * m + k - m] = 2 * sigmoid(p[k] * args.scale[1] + args.base[k]);
  }
  float* comb = p + 2 * m;
  for (int64_t k = 0; k < m * m; ++k) comb[k] = comb[k] * args.scale[2] + args.base[2 * m + k];
  make_stochastic(args, comb);
  for (int64_t k = 0; k < m; ++k) weigh(args, x, comb + k, m, args.mixed + r * n + k * args.size);
}

template <class T>
void mix_rows(const StreamMixArgs& args) {
  const int64_t n = round_up(args.streams * args.size, 16);
  Buffer<float> rows(args.num_threads * n);
  parallel_for(args.rows, threads_for(args.num_threads, args.rows * n * args.outputs()),
               [&](int64_t r, int thread) { mix_row<T>(args, r, rows.get() + thread * n); });
}

template <class T>
void expand_rows(const StreamExpandArgs& args) {
  const int64_t values = args.streams * args.size;
  parallel_for(args.rows, threads_for(args.num_threads, args.rows * values), [&](int64_t r) {
    const T* y = static_cast<const T*>(args.y) + r * args.size;
    for (int64_t k = 0; k < args.streams; ++k) {
      const float* mixed = args.mixed + r * values + k * args.size;
      T* out = static_cast<T*>(args.out) + r * values + k * args.size;
      const Vec post = set1(args.post[r * args.streams + k]);
      for_lanes(args.size, [&](int64_t i, auto load_i, auto store_i) {
        store_i(out + i, fma(post, load_i(y + i), load_i(mixed + i)));
      });
    }
  });
}

inline void stream_mix_any(const StreamMixArgs& args) {
  args.type == Dtype::kFloat32 ? mix_rows<float>(args) : mix_rows<bf16>(args);
}
inline void stream_expand_any(const StreamExpandArgs& args) {
  args.type == Dtype::kFloat32 ? expand_rows<float>(args) : expand_rows<bf16>(args);
}

}  // namespace
}  // namespace eprt
