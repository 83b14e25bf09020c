// Extend: a chunk of new tokens per request against its cached prefix and itself.
//
// For each block of kBlock absolute positions the latent rows are gathered once per group of heads. For each head they
// are expanded by w_kv_b to keys and values in scratch memory, which all rows of the chunk (in tiles of kRows) attend
// with an fp32 online softmax. Blocks before the chunk are full rectangles, the last ones causal triangles. Neither the
// score matrix nor the keys and values of the whole context are ever materialised.
//
// Blocks start at multiples of kBlock from position 0 and are computed in order, and masked positions have weight 0
// exactly. So a row's bits depend neither on where the prompt was cut into chunks, nor on the batch, nor on the
// threads.
#pragma once

#include <type_traits>

#include "cpu/buffer.h"
#include "cpu/mla.h"
#include "cpu/mla_pack.h"
#include "cpu/team.h"

namespace eprt {
namespace {

template <class Dot>
class MlaExtend {
 public:
  explicit MlaExtend(const MlaArgs& args) : args_(args) {}

  void run() {
    const int64_t group = head_group();
    const int64_t num_groups = div_up(args_.num_heads, group);
    int64_t max_rows = 0;
    for (int64_t b = 0; b < args_.num_requests; ++b) max_rows = max_of(max_rows, args_.end_row(b) - args_.first_row(b));
    if (max_rows == 0) return;
    const int64_t scratch_size = Scratch(*this, nullptr, max_rows, group).size;
    Buffer<Word> scratch_buffer(args_.num_threads * scratch_size);
    parallel_for(args_.num_requests * num_groups, args_.num_threads, [&](int64_t i, int thread) {
      const int64_t b = i / num_groups, g = i % num_groups;
      if (args_.first_row(b) == args_.end_row(b)) return;
      const Scratch s(*this, scratch_buffer.get() + thread * scratch_size, max_rows, group);
      attend(b, g * group, min_of(args_.num_heads, (g + 1) * group), s);
    });
  }

 private:
  // A tile of kRows: of AMX, pairs of tiles that share what they read of B.
  static constexpr int64_t kBlock = 128, kRows = Dot::kTiles ? 64 : 48, kHeadGroup = 8, kWeightRows = 32;
  using WordValue = std::conditional_t<Dot::kStep == 2, bf16, float>;

  struct Scratch {    // of one thread; constructed twice, first with a null base to measure the size
    Word* latent;     // [kBlock, latent_words]: gathered rows
    Word* rope;       // [kBlock, rope_words]
    Word* latent_t;   // [latent_words, kBlock] in panels
    Word* key_t;      // [key_words, kBlock] in panels: nope words of one head, then rope words of all heads
    Word* value;      // [kBlock / kStep, value] in panels
    Word* value_t;    // [value, kBlock / kStep]
    Word* weight;     // [kWeightRows, latent_words]: converted rows of w_kv_b
    float* expanded;  // [nope + value + 1, kBlock]
    Word* query;      // [group, rows, key_words]
    float* out;       // [group, rows, value_row]
    float* max;       // [group, rows], in units of log2
    float* sum;       // [group, rows]
    float* score;     // [kRows, kBlock]
    Word* p;          // [kRows, kBlock / kStep]
    float* scale;     // [kRows]
    int64_t max_rows, size = 0;

    Scratch(const MlaExtend& e, Word* base, int64_t rows, int64_t group) : max_rows(rows) {
      const auto place = [&](auto*& pointer, int64_t n) {
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + size);
        size += round_up(n, 16);
      };
      place(latent, kBlock * e.latent_words_);
      place(rope, kBlock * e.rope_words_);
      place(latent_t, e.latent_words_ * kBlock);
      place(key_t, e.key_words_ * kBlock);
      place(value, kBlock / Dot::kStep * round_up(e.args_.value, kPanel));
      place(value_t, e.args_.value * kBlock / Dot::kStep);
      place(weight, kWeightRows * e.latent_words_);
      place(expanded, (e.args_.nope + e.args_.value + 1) * kBlock);
      place(query, group * rows * e.key_words_);
      place(out, group * rows * e.value_row_);
      place(max, group * rows);
      place(sum, group * rows);
      place(score, kRows * kBlock);
      place(p, kRows * kBlock / Dot::kStep);
      place(scale, kRows);
    }
  };

  // Heads that share a gathered block; fewer if threads would idle otherwise. The result is the same for any size.
  int64_t head_group() const {
    int64_t group = min_of(args_.num_heads, kHeadGroup);
    while (group > 1 && args_.num_requests * div_up(args_.num_heads, group) < 2 * args_.num_threads) group /= 2;
    return group;
  }

  void attend(int64_t b, int64_t head_begin, int64_t head_end, const Scratch& s) {
    const int64_t rows = args_.end_row(b) - args_.first_row(b), seq_len = args_.seq_len[b];
    const int64_t start = seq_len - rows;  // position of the chunk's first row
    for (int64_t h = head_begin; h < head_end; ++h) load_query(b, h, h - head_begin, s);
    for (int64_t block = 0; block < seq_len; block += kBlock) {
      const int64_t size = min_of(kBlock, seq_len - block);
      gather(b, block, size, s);
      for (int64_t h = head_begin; h < head_end; ++h) {
        expand(h, size, s);
        for (int64_t row = max_of<int64_t>(0, block - start) / kRows * kRows; row < rows; row += kRows) {
          const int64_t index = (h - head_begin) * s.max_rows + row;
          attend_tile(start + row - block, min_of(kRows, rows - row), block == 0, size, index, s);
        }
      }
    }
    for (int64_t h = head_begin; h < head_end; ++h) store_head(b, h, h - head_begin, s);
  }

  void load_query(int64_t b, int64_t head, int64_t slot, const Scratch& s) {
    const int64_t first = args_.first_row(b), rows = args_.end_row(b) - first;
    for (int64_t i = 0; i < rows; ++i) {
      Word* q = s.query + (slot * s.max_rows + i) * key_words_;
      const int64_t nope = (first + i) * args_.q_nope_row + head * args_.q_nope_head;
      const int64_t rope = (first + i) * args_.q_rope_row + head * args_.q_rope_head;
      to_words<Dot>(element(args_.q_nope, args_.q_type, nope), args_.q_type, args_.nope, q);
      to_words<Dot>(element(args_.q_rope, args_.q_type, rope), args_.q_type, args_.rope, q + nope_words_);
    }
    for (int64_t i = 0; i < rows; ++i) {
      s.max[slot * s.max_rows + i] = kLowest;
      s.sum[slot * s.max_rows + i] = 0;
    }
  }

  // Columns of positions past the context are zero.
  void gather(int64_t b, int64_t block, int64_t size, const Scratch& s) {
    for (int64_t i = 0; i < size; ++i) {
      const void* kv = args_.kv_at(b, block + i);
      latent_to_words<Dot>(args_, kv, s.latent + i * latent_words_);
      rope_to_words<Dot>(args_, kv, s.rope + i * rope_words_);
    }
    transpose_to_panels(s.latent, latent_words_, size, latent_words_, s.latent_t, latent_words_ * kPanel);
    transpose_to_panels(s.rope, rope_words_, size, rope_words_, s.key_t + nope_words_ * kPanel, key_words_ * kPanel);
  }

  // One head's keys (transposed) and values of the gathered block: expanded = w_kv_b[head] latent^T, repacked.
  void expand(int64_t head, int64_t size, const Scratch& s) {
    const int64_t rows = args_.nope + args_.value, columns = round_up(size, Vec::kWidth);
    const bool direct = args_.lora % Dot::kStep == 0 && size_of(args_.w_type) * Dot::kStep == sizeof(Word);
    for (int64_t r = 0; r < rows; r += direct ? rows : kWeightRows) {
      const int64_t count = direct ? rows : min_of(kWeightRows, rows - r);
      const void* w = element(args_.w_kv_b, args_.w_type, (head * rows + r) * args_.lora);
      const Word* words = static_cast<const Word*>(w);
      if (!direct) {
        for (int64_t i = 0; i < count; ++i) {
          to_words<Dot>(element(w, args_.w_type, i * args_.lora), args_.w_type, args_.lora,
                        s.weight + i * latent_words_);
        }
        words = s.weight;
      }
      gemm<Dot>(count, size, latent_words_, {words, latent_words_}, panels(s.latent_t, latent_words_),
                {s.expanded + r * kBlock, kBlock});
    }
    pack_key(columns, s);
    pack_value(columns, s);
  }

  void pack_key(int64_t columns, const Scratch& s) {
    for (int64_t k = 0; k < nope_words_; ++k) {
      const float* even = s.expanded + k * Dot::kStep * kBlock;
      const bool has_odd = k * Dot::kStep + 1 < args_.nope;
      for (int64_t n = 0; n < columns; n += Vec::kWidth) {
        Word* out = s.key_t + n / kPanel * key_words_ * kPanel + k * kPanel + n % kPanel;
        store_pair<Dot>(out, load(even + n), has_odd ? load(even + kBlock + n) : zero());
      }
    }
  }

  void pack_value(int64_t columns, const Scratch& s) {
    constexpr int64_t kWords = kBlock / Dot::kStep;
    for (int64_t v = 0; v < args_.value; ++v) {
      to_words<Dot>(s.expanded + (args_.nope + v) * kBlock, Dtype::kFloat32, columns, s.value_t + v * kWords);
    }
    transpose_to_panels(s.value_t, kWords, args_.value, columns / Dot::kStep, s.value, kWords * kPanel);
  }

  // kRows rows of one head attend the block. offset: position of the first row, relative to the block; index: its row
  // in the scratch memory.
  void attend_tile(int64_t offset, int64_t rows, bool first_block, int64_t size, int64_t index, const Scratch& s) {
    const int64_t skip = max_of<int64_t>(0, -offset);  // rows before the block see none of it
    const int64_t visible = min_of(size, offset + rows);
    offset += skip, rows -= skip, index += skip;
    const int64_t columns = round_up(visible, Vec::kWidth);
    constexpr int64_t kWords = kBlock / Dot::kStep;
    gemm<Dot>(rows, visible, key_words_, {s.query + index * key_words_, key_words_}, panels(s.key_t, key_words_),
              {s.score, kBlock});
    for (int64_t i = 0; i < rows; ++i) softmax_row(min_of(size, offset + i + 1), columns, index + i, i, s);
    const MatrixC c{s.out + index * value_row_, value_row_, first_block ? nullptr : s.scale};
    gemm<Dot>(rows, args_.value, columns / Dot::kStep, {s.p, kWords}, panels(s.value, kWords), c);
  }

  // Softmax of row i of the tile, over the first `visible` columns; the weights of the others are 0.
  void softmax_row(int64_t visible, int64_t columns, int64_t index, int64_t i, const Scratch& s) {
    float* score = s.score + i * kBlock;
    for (int64_t n = visible; n < columns; ++n) score[n] = -__builtin_inff();
    const Vec to_log2 = set1(args_.softmax_scale * kLog2E);
    const int64_t used = round_up(visible, Vec::kWidth);
    Vec top = set1(kLowest);
    for (int64_t n = 0; n < used; n += Vec::kWidth) {
      const Vec x = load(score + n) * to_log2;
      top = max(top, x);
      store(score + n, x);
    }
    const float old_max = s.max[index], new_max = max_of(old_max, reduce_max(top));
    auto* const p = reinterpret_cast<WordValue*>(s.p + i * (kBlock / Dot::kStep));
    Vec sum = zero();
    for (int64_t n = 0; n < used; n += Vec::kWidth) {
      const Vec weight = exp2(load(score + n) - set1(new_max));
      sum = sum + weight;
      store(p + n, weight);
    }
    std::memset(p + used, 0, (columns - used) * sizeof(WordValue));
    const float scale = lane0(exp2(set1(old_max) - set1(new_max)));
    s.max[index] = new_max;
    s.sum[index] = s.sum[index] * scale + reduce_add(sum);
    s.scale[i] = scale;
  }

  void store_head(int64_t b, int64_t head, int64_t slot, const Scratch& s) {
    const int64_t first = args_.first_row(b);
    for (int64_t i = 0; i < args_.end_row(b) - first; ++i) {
      const int64_t index = slot * s.max_rows + i;
      float* row = s.out + index * value_row_;
      const Vec inverse = set1(1.0f / s.sum[index]);
      for (int64_t n = 0; n < value_row_; n += Vec::kWidth) store(row + n, load(row + n) * inverse);
      store_row(row, args_, first + i, head);
    }
  }

  const MlaArgs& args_;
  const int64_t latent_words_ = words_of<Dot>(args_.lora);
  const int64_t nope_words_ = words_of<Dot>(args_.nope);
  const int64_t rope_words_ = words_of<Dot>(args_.rope);
  const int64_t key_words_ = nope_words_ + rope_words_;
  const int64_t value_row_ = round_up(args_.value, Vec::kWidth);
};

}  // namespace
}  // namespace eprt
