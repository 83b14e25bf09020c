// Attention to shared keys, and pooling (shared_attention.h), written once and included once per instruction set.
#pragma once

#include "cpu/buffer.h"
#include "cpu/lane_loop.h"
#include "cpu/mla_pack.h"
#include "cpu/shared_attention.h"
#include "cpu/team.h"

namespace eprt {
namespace {

// Four heads at a time: a key that was read serves all of them.
constexpr int64_t kHeads = 4;

// bfloat16 holds every value of an fp8 entry exactly.
inline void widen_entry(EntryFp8 format, const uint8_t* entry, bf16* out) {
  const uint8_t* exponent = entry + format.scale_at();
  float piece[EntryFp8::kGroup];
  for (int64_t first = 0; first < format.plain(); first += EntryFp8::kGroup) {
    const float scale = std::bit_cast<float>(static_cast<uint32_t>(*exponent++) << 23);
    const int64_t count = min_of(EntryFp8::kGroup, format.plain() - first);
    for (int64_t i = 0; i < count; ++i) piece[i] = kE4M3.value[entry[first + i]] * scale;
    convert(piece, count, out + first);
  }
  std::memcpy(out + format.plain(), entry + format.plain(), format.rope * sizeof(bf16));
}

template <class T, class L, class E>  // of queries, tokens and entries, as the products take them
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
    const int64_t widened_size = is_fp8_ ? round_up(most * args_.size, 32) : 0;
    Buffer<bf16> widened(args_.num_threads * widened_size);
    parallel_for(args_.rows, threads_for(args_.num_threads, args_.rows * most * args_.heads * args_.size),
                 [&](int64_t row, int thread) {
                   float* query = scratch.get() + thread * scratch_size;
                   const E** entry = keys.get() + thread * most;
                   const L* local = find_keys(row, entry, widened.get() + thread * widened_size);
                   compute_row(row, local, entry, query, query + query_size, score_row);
                 });
  }

 private:
  int64_t num_local(int64_t row) const { return args_.local_end[row] - args_.local_begin[row]; }
  int64_t num_keys(int64_t row) const { return num_local(row) + args_.num_entries[row]; }

  // The row's tokens, and where its entries are: in the tensors or, where those are fp8, in `widened`.
  const L* find_keys(int64_t row, const E** entry, bf16* widened) const {
    const int64_t first = args_.local_begin[row] * args_.entry_size, n = num_local(row), m = args_.num_entries[row];
    if (!is_fp8_) {
      for (int64_t i = 0; i < m; ++i) entry[i] = static_cast<const E*>(args_.entries) + args_.place(row, i);
      return static_cast<const L*>(args_.local) + first;
    }
    if constexpr (std::is_same_v<L, bf16> && std::is_same_v<E, bf16>) {
      const EntryFp8 format{args_.size, args_.rope};
      const auto* local = static_cast<const uint8_t*>(args_.local) + first;
      for (int64_t i = 0; i < n; ++i) widen_entry(format, local + i * args_.entry_size, widened + i * args_.size);
      for (int64_t i = 0; i < m; ++i) {
        bf16* out = widened + (n + i) * args_.size;
        widen_entry(format, static_cast<const uint8_t*>(args_.entries) + args_.place(row, i), out);
        entry[i] = out;
      }
      return widened;
    }
    return nullptr;
  }

  void compute_row(int64_t row, const L* local, const E* const* entry, float* query, float* score,
                   int64_t score_row) const {
    const int64_t n = num_local(row), total = num_keys(row), row_size = args_.heads * args_.size;
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

  void sum_values(const float* weight, int64_t row, const L* local, int64_t n, const E* const* entry, int64_t m,
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
  const bool is_fp8_ = args_.entry_type == Dtype::kFp8E4M3;
};

inline void shared_attention_any(const SharedAttentionArgs& args) {
  const bool wide = args.type == Dtype::kFloat32;
  if (args.entry_type == Dtype::kFloat32) {
    return wide ? SharedAttention<float, float, float>(args).run() : SharedAttention<bf16, bf16, float>(args).run();
  }
  if (!wide) return SharedAttention<bf16, bf16, bf16>(args).run();
  if (args.entry_type == Dtype::kBFloat16) return SharedAttention<float, float, bf16>(args).run();
  SharedAttention<float, bf16, bf16>(args).run();
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
