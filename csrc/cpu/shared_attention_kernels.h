// Attention to shared keys, and pooling (shared_attention.h), written once and included once per instruction set.
#pragma once

#include "cpu/buffer.h"
#include "cpu/lane_loop.h"
#include "cpu/shared_attention.h"
#include "cpu/team.h"

namespace eprt {
namespace {

// Four heads at a time: a key that was read serves all of them.
constexpr int64_t kHeads = 4;

template <class T, class E>  // of tokens, and of entries
class SharedAttention {
 public:
  explicit SharedAttention(const SharedAttentionArgs& args) : args_(args) {}

  void run() {
    int64_t most = 0;
    for (int64_t row = 0; row < args_.rows; ++row) most = max_of(most, num_keys(row));
    const int64_t query_size = round_up(padded_heads_ * args_.size, 16);
    const int64_t score_row = round_up(most, 16);
    const int64_t scratch_size = query_size + padded_heads_ * score_row;
    Buffer<float> scratch(args_.num_threads * scratch_size);
    Buffer<const E*> keys(args_.num_threads * most);
    parallel_for(args_.rows, threads_for(args_.num_threads, args_.rows * most * args_.heads * args_.size),
                 [&](int64_t row, int thread) {
                   float* query = scratch.get() + thread * scratch_size;
                   compute_row(row, query, query + query_size, score_row, keys.get() + thread * most);
                 });
  }

 private:
  int64_t num_local(int64_t row) const { return args_.local_end[row] - args_.local_begin[row]; }
  int64_t num_keys(int64_t row) const { return num_local(row) + args_.num_entries[row]; }

  void compute_row(int64_t row, float* query, float* score, int64_t score_row, const E** entry) const {
    const int64_t n = num_local(row), total = num_keys(row), row_size = args_.heads * args_.size;
    const T* local = static_cast<const T*>(args_.local) + args_.local_begin[row] * args_.size;
    for (int64_t i = 0; i < total - n; ++i) entry[i] = static_cast<const E*>(args_.entries) + args_.place(row, i);
    const T* from = static_cast<const T*>(args_.query) + row * row_size;
    for_lanes(row_size,
              [&](int64_t i, auto load_i, auto store_i) { store_i(query + i, load_i(from + i) * set1(args_.scale)); });
    std::memset(query + row_size, 0, (padded_heads_ - args_.heads) * args_.size * sizeof(float));
    for (int64_t h = 0; h < args_.heads; h += kHeads) {
      const float* q = query + h * args_.size;
      float* s = score + h * score_row;
      for (int64_t i = 0; i < n; ++i) score_key(q, local + i * args_.size, s + i, score_row);
      for (int64_t i = 0; i < total - n; ++i) score_key(q, entry[i], s + n + i, score_row);
      const int64_t heads = min_of(kHeads, args_.heads - h);
      for (int64_t k = 0; k < heads; ++k) softmax(s + k * score_row, total, args_.sink[h + k]);
      float* out = args_.out + row * row_size + h * args_.size;
      sum_values(s, score_row, local, n, entry, total - n, out, heads);
    }
  }

  template <class K>
  void score_key(const float* query, const K* key, float* score, int64_t score_row) const {
    const int64_t size = args_.size;
    Vec sum[kHeads] = {zero(), zero(), zero(), zero()};
    for_lanes(size, [&](int64_t i, auto load_i, auto) {
      const Vec key_i = load_i(key + i);
      for (int64_t k = 0; k < kHeads; ++k) sum[k] = fma(load_i(query + k * size + i), key_i, sum[k]);
    });
    for (int64_t k = 0; k < kHeads; ++k) score[k * score_row] = reduce_add(sum[k]);
  }

  // score -> weight; the sink's share is left out.
  void softmax(float* score, int64_t n, float sink) const {
    float most = sink;
    for (int64_t i = 0; i < n; ++i) most = max_of(most, score[i]);
    const Vec shift = set1(most), log2e = set1(kLog2E);
    Vec sums = zero();
    for_lanes(n, [&](int64_t i, auto load_i, auto store_i) {
      const Vec weight = exp2((load_i(score + i) - shift) * log2e);
      store_i(score + i, weight);
      sums = sums + load_i(score + i);  // lanes beyond the end are 0
    });
    const float share = lane0(exp2(set1((sink - most) * kLog2E)));
    const Vec factor = set1(1.0f / (reduce_add(sums) + share));
    for_lanes(n, [&](int64_t i, auto load_i, auto store_i) { store_i(score + i, load_i(score + i) * factor); });
  }

  void sum_values(const float* weight, int64_t row, const T* local, int64_t n, const E* const* entry, int64_t m,
                  float* out, int64_t heads) const {
    const int64_t size = args_.size;
    for_lanes(size, [&](int64_t d, auto load_d, auto store_d) {
      Vec sum[kHeads] = {zero(), zero(), zero(), zero()};
      for (int64_t i = 0; i < n; ++i) {
        const Vec value = load_d(local + i * size + d);
        for (int64_t k = 0; k < kHeads; ++k) sum[k] = fma(set1(weight[k * row + i]), value, sum[k]);
      }
      for (int64_t i = 0; i < m; ++i) {
        const Vec value = load_d(entry[i] + d);
        for (int64_t k = 0; k < kHeads; ++k) sum[k] = fma(set1(weight[k * row + n + i]), value, sum[k]);
      }
      for (int64_t k = 0; k < heads; ++k) store_d(out + k * size + d, sum[k]);
    });
  }

  const SharedAttentionArgs& args_;
  const int64_t padded_heads_ = round_up(args_.heads, kHeads);
};

inline void shared_attention_any(const SharedAttentionArgs& args) {
  const bool wide = args.type == Dtype::kFloat32;
  if (args.entry_type == Dtype::kFloat32) {
    return wide ? SharedAttention<float, float>(args).run() : SharedAttention<bf16, float>(args).run();
  }
  wide ? SharedAttention<float, bf16>(args).run() : SharedAttention<bf16, bf16>(args).run();
}

// A softmax over the slots in each channel. Slots of none are left out.
inline void pool_row(const PoolArgs& args, int64_t row) {
  const int64_t* index = args.index + row * args.slots;
  const auto values_of = [&](int64_t slot) {
    const float* state = args.state + index[slot] * 2 * args.channels;
    return slot < args.first_slots ? state : state + args.channels - args.size;
  };
  for_lanes(args.size, [&](int64_t d, auto load_d, auto store_d) {
    Vec most = set1(kLowest);
    for (int64_t s = 0; s < args.slots; ++s) {
      if (index[s] >= 0) most = max(load_d(values_of(s) + args.channels + d), most);
    }
    Vec total = zero(), sum = zero();
    for (int64_t s = 0; s < args.slots; ++s) {
      if (index[s] < 0) continue;
      const float* value = values_of(s);
      const Vec weight = exp2((load_d(value + args.channels + d) - most) * set1(kLog2E));
      total = total + weight;
      sum = fma(weight, load_d(value + d), sum);
    }
    store_d(args.out + row * args.size + d, sum / total);
  });
}

inline void pool_entries_any(const PoolArgs& args) {
  parallel_for(args.rows, threads_for(args.num_threads, args.rows * args.slots * args.size),
               [&](int64_t row) { pool_row(args, row); });
}

}  // namespace
}  // namespace eprt
