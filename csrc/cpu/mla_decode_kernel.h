// Decode: one new token per request against its paged latent cache, in the absorbed form.
//
//   q_lat[h] = q_nope[h] W_UK[h];  score[h, s] = [q_lat | q_rope][h] . kv[s];  o_lat[h] = sum_s p[h, s] kv[s, :lora];
//   out[h] = o_lat[h] W_UV[h]^T
//
// All heads read the same latent rows, so heads are folded into the products: a block of kBlock positions is gathered
// once and is A of the scores (kv . q^T: lanes are heads, so the softmax needs no horizontal step) and B of the values.
// The context is split at multiples of kSplit positions; each split yields (max, sum, unnormalised values), and a
// second phase merges them in order. The splits depend on positions only, so neither the batch nor the number of
// threads changes a bit of the result.
#pragma once

#include "cpu/buffer.h"
#include "cpu/mla.h"
#include "cpu/mla_pack.h"
#include "cpu/team.h"

namespace eprt {
namespace {

template <class Dot>
class MlaDecode {
 public:
  explicit MlaDecode(const MlaArgs& args) : args_(args) {}

  // Requests are computed in waves, which bounds the memory of the partial results.
  void run() {
    for (int64_t first = 0, last; first < args_.num_requests; first = last) {
      int64_t num_splits = splits(first);
      for (last = first + 1; last < args_.num_requests; ++last) {
        if ((num_splits + splits(last)) * partial_size_ * 4 > kMaxPartialBytes) break;
        num_splits += splits(last);
      }
      run_wave(first, last - first, num_splits);
    }
  }

 private:
  static constexpr int64_t kSplit = 512, kBlock = Dot::kTiles ? 128 : 64, kMaxPartialBytes = 16 << 20;

  struct Task {
    int32_t request, split;
  };
  struct Partial {  // of one split
    float* max;     // [heads_padded], in units of log2
    float* sum;     // [heads_padded]
    float* values;  // [heads, lora_row]
  };
  struct Scratch {  // of a block of positions in phase 1; columns: heads_padded
    Word* rows;     // [kBlock, q_words]: the gathered latent rows
    Word* values;   // [kBlock / kStep, lora] in panels; unused if the rows can be used directly
    float* score;   // [kBlock, columns]
    Word* p;        // [kBlock / kStep, columns]
    float* scale;   // [columns]
  };

  int64_t splits(int64_t b) const { return div_up(args_.seq_len[b], kSplit); }
  const void* w_row(int64_t head, int64_t row) const {
    return element(args_.w_kv_b, args_.w_type, (head * (args_.nope + args_.value) + row) * args_.lora);
  }
  Partial partial(int64_t index) const {
    float* p = partial_ + index * partial_size_;
    return {p, p + heads_padded_, p + 2 * heads_padded_};
  }
  Word* query(int64_t i) const { return query_ + i * q_words_ * query_columns_; }

  void run_wave(int64_t first, int64_t num_requests, int64_t num_splits) {
    Buffer<float> partial(num_splits * partial_size_);
    Buffer<Word> query(num_requests * q_words_ * query_columns_);
    Buffer<Task> tasks(num_splits);
    partial_ = partial.get(), query_ = query.get();
    for (int32_t i = 0, t = 0; i < num_requests; ++i) {
      for (int32_t s = 0; s < splits(first + i); ++s) tasks.get()[t++] = {i, s};
    }
    absorb(first, num_requests);
    attend(first, tasks.get(), num_splits);
    merge_and_project(first, num_requests);
  }

  // Phase 0: query(i) = [q_lat | q_rope] of all heads of request first + i, one column per head.
  void absorb(int64_t first, int64_t num_requests) {
    const int64_t row = lora_row_ + args_.rope;
    const int64_t scratch_size = num_requests * (args_.nope + row) + args_.nope * lora_row_;
    Buffer<Word> rows_buffer(num_requests * heads_ * q_words_);
    Buffer<float> scratch(args_.num_threads * scratch_size);
    Word* rows = rows_buffer.get();
    parallel_for(heads_, args_.num_threads, [&](int64_t h, int thread) {
      float* q = scratch.get() + thread * scratch_size;
      float* lat = q + num_requests * args_.nope;
      for (int64_t i = 0; i < num_requests; ++i) {
        const int64_t index = (first + i) * args_.q_nope_row + h * args_.q_nope_head;
        convert(element(args_.q_nope, args_.q_type, index), args_.q_type, args_.nope, q + i * args_.nope);
      }
      absorb_head(h, num_requests, q, lat, row, lat + num_requests * row);
      for (int64_t i = 0; i < num_requests; ++i) {
        const int64_t index = (first + i) * args_.q_rope_row + h * args_.q_rope_head;
        convert(element(args_.q_rope, args_.q_type, index), args_.q_type, args_.rope, lat + i * row + args_.lora);
        to_words<Dot>(lat + i * row, Dtype::kFloat32, args_.kv_dim(), rows + (i * heads_ + h) * q_words_);
      }
    });
    parallel_for(num_requests, args_.num_threads, [&](int64_t i) {
      transpose_to_panels(rows + i * heads_ * q_words_, q_words_, heads_, q_words_, query(i), q_words_ * query_panel_,
                          query_panel_);
    });
  }

  // lat[i] = q[i] W_UK. In fp32, because reading the weight takes most of the time.
  void absorb_head(int64_t head, int64_t num_requests, const float* q, float* lat, int64_t lat_row, float* padded) {
    const MatrixA a{reinterpret_cast<const Word*>(q), args_.nope};
    const MatrixC c{lat, lat_row};
    const void* w = w_row(head, 0);
    if (args_.lora % Vec::kWidth) {  // a full register of columns would read past the end of the weight
      for (int64_t k = 0; k < args_.nope; ++k) {
        convert(w_row(head, k), args_.w_type, args_.lora, padded + k * lora_row_);
      }
      const MatrixB<Word> b{reinterpret_cast<const Word*>(padded), lora_row_, kPanel};
      return gemm<Fp32Dot>(num_requests, args_.lora, args_.nope, a, b, c);
    }
    if (args_.w_type == Dtype::kFloat32) {
      const MatrixB<Word> b{static_cast<const Word*>(w), args_.lora, kPanel};
      return gemm<Fp32Dot>(num_requests, args_.lora, args_.nope, a, b, c);
    }
    const MatrixB<bf16> b{static_cast<const bf16*>(w), args_.lora, kPanel};
    gemm<WidenDot>(num_requests, args_.lora, args_.nope, a, b, c);
  }

  // Phase 1. Where there are fewer splits than threads, all threads compute each split together.
  void attend(int64_t first, const Task* tasks, int64_t num_splits) {
    if (num_splits < args_.num_threads) return attend_together(first, tasks, num_splits);
    const int64_t rows_size = kBlock * q_words_ + kPanel, values_size = kBlock / Dot::kStep * value_row_;
    const int64_t columns = heads_padded_, scratch_size = rows_size + values_size + (2 * kBlock + 1) * columns;
    Buffer<Word> scratch_buffer(args_.num_threads * scratch_size);
    parallel_for(num_splits, args_.num_threads, [&](int64_t t, int thread) {
      Word* rows = scratch_buffer.get() + thread * scratch_size;
      Word* values = rows + rows_size;
      float* score = reinterpret_cast<float*>(values + values_size);
      Word* p = reinterpret_cast<Word*>(score + kBlock * columns);
      const Scratch scratch{rows, values, score, p, reinterpret_cast<float*>(p + kBlock * columns)};
      attend_split(first, tasks[t], partial(t), scratch);
    });
  }

  void attend_split(int64_t first, Task task, Partial out, Scratch scratch) {
    const int64_t b = first + task.request, begin = task.split * kSplit, end = end_of(b, begin);
    begin_sums(out, 0, heads_padded_);
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t size = min_of(kBlock, end - block);
      gather<true>(b, block, 0, size, size, scratch);
      score(task, 0, size, scratch);
      for (int64_t h = 0; h < heads_padded_; h += Vec::kWidth) softmax(size, h, out, scratch);
      add_values(size, 0, args_.lora, block == begin, out, scratch);
    }
  }

  // The same sums in the same order, in three loops: scores by stretches of positions, softmax by registers of heads,
  // values by stretches of columns. Each block of a split has scratch memory of its own.
  void attend_together(int64_t first, const Task* tasks, int64_t num_splits) {
    constexpr int64_t kBlocks = kSplit / kBlock, kColumns = 32;
    const int64_t rows_size = kBlock * q_words_ + kPanel, values_size = kBlock / Dot::kStep * value_row_;
    const int64_t columns = heads_padded_;
    const int64_t scratch_size = round_up(rows_size + values_size + (2 * kBlock + 1) * columns, 16);
    Buffer<Word> scratch_buffer(num_splits * kBlocks * scratch_size);
    const auto scratch_of = [&](int64_t t, int64_t block) {
      Word* rows = scratch_buffer.get() + (t * kBlocks + block) * scratch_size;
      Word* values = rows + rows_size;
      float* score = reinterpret_cast<float*>(values + values_size);
      Word* p = reinterpret_cast<Word*>(score + kBlock * columns);
      return Scratch{rows, values, score, p, reinterpret_cast<float*>(p + kBlock * columns)};
    };
    const auto size_of = [&](int64_t t, int64_t block) {  // 0: the split has no such block
      const int64_t b = first + tasks[t].request, begin = tasks[t].split * kSplit;
      return max_of<int64_t>(0, min_of(kBlock, end_of(b, begin) - begin - block * kBlock));
    };
    // Stretches are even, so that no pair of positions lies in two of them.
    const int64_t stretch = heads_ <= 32 ? 16 : 32, stretches = kBlock / stretch;
    parallel_for(num_splits * kBlocks * stretches, args_.num_threads, [&](int64_t i) {
      const int64_t t = i / (kBlocks * stretches), block = i / stretches % kBlocks, begin = i % stretches * stretch;
      const int64_t size = size_of(t, block), end = min_of(size, begin + stretch);
      if (begin >= end) return;
      const Scratch scratch = scratch_of(t, block);
      gather<false>(first + tasks[t].request, tasks[t].split * kSplit + block * kBlock, begin, end, size, scratch);
      score(tasks[t], begin, end, scratch);
    });
    const int64_t registers = heads_padded_ / Vec::kWidth;
    const int64_t softmax_threads = num_splits * registers > 1 ? args_.num_threads : 1;
    parallel_for(num_splits * registers, static_cast<int>(softmax_threads), [&](int64_t i) {
      const int64_t t = i / registers, h = i % registers * Vec::kWidth;
      begin_sums(partial(t), h, h + Vec::kWidth);
      for (int64_t block = 0; block < kBlocks && size_of(t, block) > 0; ++block) {
        softmax(size_of(t, block), h, partial(t), scratch_of(t, block));
      }
    });
    const int64_t parts = div_up(args_.lora, kColumns);
    parallel_for(num_splits * parts, args_.num_threads, [&](int64_t i) {
      const int64_t t = i / parts, begin = i % parts * kColumns, end = min_of(args_.lora, begin + kColumns);
      for (int64_t block = 0; block < kBlocks && size_of(t, block) > 0; ++block) {
        add_values(size_of(t, block), begin, end, block == 0, partial(t), scratch_of(t, block));
      }
    });
  }

  int64_t end_of(int64_t b, int64_t begin) const { return min_of<int64_t>(args_.seq_len[b], begin + kSplit); }

  static void begin_sums(Partial out, int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) out.max[h] = kLowest, out.sum[h] = 0;
  }

  // Scores of positions begin..end of a block, against all heads.
  void score(Task task, int64_t begin, int64_t end, Scratch scratch) const {
    gemm<Dot>(end - begin, heads_padded_, q_words_, {scratch.rows + begin * q_words_, q_words_},
              panels(query(task.request), q_words_, query_panel_),
              {scratch.score + begin * heads_padded_, heads_padded_});
  }

  // Adds columns begin..end of a block's values, after scaling what is there.
  void add_values(int64_t size, int64_t begin, int64_t end, bool is_first, Partial out, Scratch scratch) const {
    const MatrixC c{out.values + begin, lora_row_, is_first ? nullptr : scratch.scale};
    MatrixB<Word> b = values(scratch);
    b.data += begin / kPanel * b.panel + begin % kPanel;
    gemm<Dot>(heads_, end - begin, words_of<Dot>(size), {scratch.p, 1, heads_padded_}, b, c);
  }

  // Gathers the latent rows of positions begin..end of a block of `size` positions in scratch.rows, and as B of the
  // values. begin is even, end too unless it is the last. kPrefetches: rows of the next block, which arrive while this
  // block is multiplied.
  template <bool kPrefetches>
  void gather(int64_t b, int64_t block, int64_t begin, int64_t end, int64_t size, Scratch scratch) const {
    for (int64_t s = begin; s < end; ++s) {
      Word* row = scratch.rows + s * q_words_;
      entry_to_words<Dot>(args_, args_.kv_at(b, block + s), row);
      if (kPrefetches && block + kBlock + s < args_.seq_len[b]) prefetch(args_.kv_at(b, block + kBlock + s));
      if (Dot::kStep == 2 && s % 2) pair_rows(row - q_words_, row, s / 2, scratch);
    }
    if (Dot::kStep == 2 && end == size && size % 2) {  // the row that stands in for the missing one is multiplied by 0
      const Word* last = scratch.rows + (size - 1) * q_words_;
      pair_rows(last, last, size / 2, scratch);
    }
  }

  MatrixB<Word> values(Scratch scratch) const {
    if (Dot::kStep == 1) return {scratch.rows, q_words_, kPanel};
    return panels(scratch.values, kBlock / 2);
  }

  void prefetch(const void* row) const {
    const int64_t num_bytes = args_.kv_entry_bytes();
    for (int64_t i = 0; i < num_bytes; i += 64) _mm_prefetch(static_cast<const char*>(row) + i, _MM_HINT_T1);
  }

  void pair_rows(const Word* even, const Word* odd, int64_t pair, Scratch scratch) const {
    for (int64_t n = 0; n < args_.lora; n += Vec::kWidth) {
      interleave(even, odd, n, scratch.values + n / kPanel * (kBlock / 2) * kPanel + pair * kPanel + n % kPanel);
    }
  }

  // One block of the online softmax, lanes = heads from h on: p, the running max and sum, and the factor of the earlier
  // values.
  void softmax(int64_t size, int64_t h, Partial out, Scratch scratch) const {
    const int64_t columns = heads_padded_;
    const Vec to_log2 = set1(args_.softmax_scale * kLog2E);
    const float* score = scratch.score + h;
    const Vec old_max = load(out.max + h);
    Vec new_max = old_max;
    for (int64_t s = 0; s < size; ++s) new_max = max(new_max, load(score + s * columns) * to_log2);
    const auto weight = [&](int64_t s) { return exp2(load(score + s * columns) * to_log2 - new_max); };
    const Vec scale = exp2(old_max - new_max);
    Vec sum = load(out.sum + h) * scale;
    for (int64_t s = 0; s < size; s += Dot::kStep) {
      const Vec even = weight(s), odd = Dot::kStep == 2 && s + 1 < size ? weight(s + 1) : zero();
      sum = sum + (even + odd);
      store_pair<Dot>(scratch.p + s / Dot::kStep * columns + h, even, odd);
    }
    store(out.max + h, new_max);
    store(out.sum + h, sum);
    store(scratch.scale + h, scale);
  }

  // Phase 2: merge the splits of each (request, head) in order, then project by W_UV.
  void merge_and_project(int64_t first, int64_t num_requests) {
    Buffer<int64_t> start_buffer(num_requests + 1);
    int64_t* start = start_buffer.get();
    start[0] = 0;
    for (int64_t i = 0; i < num_requests; ++i) start[i + 1] = start[i] + splits(first + i);
    const int64_t scratch_size = num_requests * (lora_row_ + args_.value);
    Buffer<float> scratch(args_.num_threads * scratch_size);
    parallel_for(heads_, args_.num_threads, [&](int64_t h, int thread) {
      float* lat = scratch.get() + thread * scratch_size;
      float* out = lat + num_requests * lora_row_;
      for (int64_t i = 0; i < num_requests; ++i) merge(h, start[i], start[i + 1], lat + i * lora_row_);
      const void* w = w_row(h, args_.nope);
      if (args_.w_type == Dtype::kFloat32) {
        dot_rows(num_requests, lat, lora_row_, static_cast<const float*>(w), args_.lora, args_.value, out, args_.value);
      } else {
        dot_rows(num_requests, lat, lora_row_, static_cast<const bf16*>(w), args_.lora, args_.value, out, args_.value);
      }
      for (int64_t i = 0; i < num_requests; ++i) {
        store_row(out + i * args_.value, args_, first + i, h);
      }
    });
  }

  void merge(int64_t head, int64_t begin, int64_t end, float* lat) const {
    float top = kLowest;
    for (int64_t s = begin; s < end; ++s) top = max_of(top, partial(s).max[head]);
    float sum = 0;
    for (int64_t s = begin; s < end; ++s) {
      const Partial part = partial(s);
      const Vec scale = exp2(set1(part.max[head]) - set1(top));
      sum += part.sum[head] * lane0(scale);
      for (int64_t n = 0; n < lora_row_; n += Vec::kWidth) {
        const Vec before = s == begin ? zero() : load(lat + n);
        store(lat + n, fma(load(part.values + head * lora_row_ + n), scale, before));
      }
    }
    const Vec inverse = set1(1.0f / sum);
    for (int64_t n = 0; n < lora_row_; n += Vec::kWidth) store(lat + n, load(lat + n) * inverse);
  }

  const MlaArgs& args_;
  const int64_t heads_ = args_.num_heads;
  const int64_t heads_padded_ = round_up(heads_, Vec::kWidth);
  const int64_t query_panel_ = min_of<int64_t>(kPanel, heads_padded_);
  const int64_t query_columns_ = round_up(heads_, query_panel_);
  const int64_t q_words_ = words_of<Dot>(args_.kv_dim());
  const int64_t lora_row_ = round_up(args_.lora, Vec::kWidth);
  const int64_t value_row_ = round_up(args_.lora, kPanel);
  const int64_t partial_size_ = 2 * heads_padded_ + heads_ * lora_row_;
  float* partial_ = nullptr;
  Word* query_ = nullptr;
};

}  // namespace
}  // namespace eprt
