// Scores and choice of the indexer (index_topk.h), written once and included once per instruction set.
//
// Rows of one request form tiles, which read each block of keys once. Scores are computed piece by piece of the context
// and for a wave of tiles at a time, which bounds their memory. Every score is summed in the order of the values and of
// the heads, whatever the tile, so neither batch nor chunk nor thread changes a bit of it, and equal scores fall to the
// lower position: a query's choice is its own.
#pragma once

#include <algorithm>
#include <functional>

#include "cpu/buffer.h"
#include "cpu/fp4.h"
#include "cpu/index_topk.h"
#include "cpu/mla_pack.h"
#include "cpu/team.h"
#if defined(__AMX_BF16__)
#include "cpu/mla_gemm_amx.h"
#endif

namespace eprt {
namespace {

template <class Dot>
class IndexTopk {
 public:
  explicit IndexTopk(const IndexArgs& args) : args_(args) {}

  void run() {
    Buffer<Tile> tiles_buffer(args_.num_rows);
    Tile* tiles = tiles_buffer.get();
    const int64_t num_tiles = cut_tiles(tiles);
    for (int64_t first = 0, last; first < num_tiles; first = last) {
      int64_t size = tiles[first].num_scores(), num_splits = tiles[first].num_splits();
      for (last = first + 1; last < num_tiles; ++last) {
        if (size + tiles[last].num_scores() > kMaxScores) break;
        size += tiles[last].num_scores(), num_splits += tiles[last].num_splits();
      }
      run_wave(tiles + first, last - first, size, num_splits);
    }
  }

 private:
  static constexpr int64_t kRows = 8, kBlock = 128, kSplit = 1024, kMaxScores = 8 << 20;

  struct Tile {                     // rows of one request
    int64_t row, num_rows, length;  // length: the longest of its rows
    float* score;                   // [num_rows, length]

    int64_t num_scores() const { return num_rows * length; }
    int64_t num_splits() const { return div_up(length, kSplit); }
  };
  struct Task {
    int64_t tile, split;
  };
  struct Scratch {   // of one thread
    Word* query;     // [kRows, heads, words]
    Word* keys;      // [kBlock, words]
    Word* keys_t;    // [words, kBlock] in panels
    float* product;  // [heads, kBlock]
  };

  int64_t cut_tiles(Tile* tiles) const {
    int64_t num_tiles = 0;
    for (int64_t t = 0; t < args_.num_rows; ++t) {
      Tile* tile = tiles + num_tiles - 1;
      if (num_tiles == 0 || args_.request[tile->row] != args_.request[t] || tile->num_rows == kRows) {
        tiles[num_tiles++] = {t, 1, args_.length[t], nullptr};
      } else {
        tile->num_rows += 1;
        tile->length = max_of<int64_t>(tile->length, args_.length[t]);
      }
    }
    return num_tiles;
  }

  void run_wave(Tile* tiles, int64_t num_tiles, int64_t num_scores, int64_t num_splits) {
    Buffer<float> scores(num_scores);
    Buffer<Task> tasks(num_splits);
    int64_t at = 0, num_tasks = 0, longest = 0;
    for (int64_t i = 0; i < num_tiles; ++i) {
      tiles[i].score = scores.get() + at;
      at += tiles[i].num_scores();
      longest = max_of(longest, tiles[i].length);
      for (int64_t split = 0; split < tiles[i].num_splits(); ++split) tasks.get()[num_tasks++] = {i, split};
    }
    const int64_t query_size = kRows * args_.heads * words_, keys_size = kBlock * words_ + kPanel;
    const int64_t scratch_size = round_up(query_size + 2 * keys_size + args_.heads * kBlock, 16);
    Buffer<Word> scratch_buffer(args_.num_threads * scratch_size);
    Buffer<float> sorted_buffer(args_.num_threads * longest);
    parallel_for(num_tasks, args_.num_threads, [&](int64_t i, int thread) {
      Word* base = scratch_buffer.get() + thread * scratch_size;
      Word* keys = base + query_size;
      const Scratch scratch{base, keys, keys + keys_size, reinterpret_cast<float*>(keys + 2 * keys_size)};
      score_split(tiles[tasks.get()[i].tile], tasks.get()[i].split * kSplit, scratch);
    });
    parallel_for(num_tiles, args_.num_threads, [&](int64_t i, int thread) {
      float* sorted = sorted_buffer.get() + thread * longest;
      for (int64_t r = 0; r < tiles[i].num_rows; ++r) {
        choose(tiles[i].row + r, tiles[i].score + r * tiles[i].length, sorted);
      }
    });
  }

  void score_split(const Tile& tile, int64_t begin, const Scratch& s) {
    const int64_t end = min_of<int64_t>(tile.length, begin + kSplit);
    for (int64_t r = 0; r < tile.num_rows; ++r) {
      for (int64_t h = 0; h < args_.heads; ++h) {
        const int64_t index = (tile.row + r) * args_.query_row + h * args_.query_head;
        const void* query = element(args_.query, args_.query_type, index);
        to_words<Dot>(query, args_.query_type, args_.size, s.query + (r * args_.heads + h) * words_);
      }
    }
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t count = min_of(kBlock, end - block);
      for (int64_t i = 0; i < count; ++i) key_to_words(args_.key_at(tile.row, block + i), s.keys + i * words_);
      transpose_to_panels(s.keys, words_, count, words_, s.keys_t, words_ * kPanel);
      for (int64_t r = 0; r < tile.num_rows; ++r) {
        const int64_t visible = min_of<int64_t>(count, args_.length[tile.row + r] - block);
        if (visible > 0) score_block(tile.row + r, r, visible, tile.score + r * tile.length + block, s);
      }
    }
  }

  void key_to_words(const void* key, Word* words) const {
    const auto* bytes = static_cast<const uint8_t*>(key);
    if (args_.key_type == Dtype::kFp4) return fp4_key_to_words(bytes, words);
    if (args_.key_type != Dtype::kFp8E4M3) return to_words<Dot>(key, args_.key_type, args_.size, words);
    float scale;
    std::memcpy(&scale, bytes + args_.size, sizeof scale);
    scale_to_words<Dot>(scale, args_.size, [&](int64_t i) { return kE4M3.value[bytes[i]]; }, words);
  }

  void fp4_key_to_words(const uint8_t* bytes, Word* words) const {
    const uint8_t* exponent = bytes + args_.size / 2;
    for (int64_t first = 0; first < args_.size; first += kFp4Block) {
      const float scale = std::bit_cast<float>(static_cast<uint32_t>(*exponent++) << 23);
      const auto value = [&](int64_t i) {
        const int two = bytes[(first + i) / 2];
        return kFp4Values[i % 2 ? two >> 4 : two & 15];
      };
      scale_to_words<Dot>(scale, min_of(kFp4Block, args_.size - first), value, words + first / Dot::kStep);
    }
  }

  void score_block(int64_t row, int64_t index, int64_t count, float* out, const Scratch& s) const {
    gemm<Dot>(args_.heads, count, words_, {s.query + index * args_.heads * words_, words_}, panels(s.keys_t, words_),
              {s.product, kBlock});
    const float* weight = args_.weight + row * args_.heads;
    for (int64_t n = 0; n < count; n += Vec::kWidth) {
      Vec sum = zero();
      for (int64_t h = 0; h < args_.heads; ++h) {
        sum = fma(set1(weight[h]), max(zero(), load(s.product + h * kBlock + n)), sum);
      }
      if (count - n >= Vec::kWidth) {
        store(out + n, sum);
      } else {
        store_n(out + n, sum, static_cast<int>(count - n));
      }
    }
  }

  // A score that is not a number counts as the lowest.
  void choose(int64_t row, float* score, float* sorted) const {
    const int64_t length = args_.length[row], chosen = min_of(args_.top_k, length);
    int32_t* slot = args_.slot + row * args_.top_k;
    std::fill(slot + chosen, slot + args_.top_k, -1);
    if (chosen == length) {
      for (int64_t i = 0; i < length; ++i) slot[i] = args_.slot_at(row, i);
      return;
    }
    for (int64_t i = 0; i < length; ++i) {
      if (score[i] != score[i]) score[i] = -__builtin_inff();
    }
    std::copy(score, score + length, sorted);
    std::nth_element(sorted, sorted + chosen - 1, sorted + length, std::greater<float>());
    const float least = sorted[chosen - 1];
    int64_t num_equal = chosen - std::count_if(score, score + length, [&](float each) { return each > least; });
    for (int64_t i = 0, next = 0; next < chosen; ++i) {
      if (score[i] > least || (score[i] == least && num_equal-- > 0)) slot[next++] = args_.slot_at(row, i);
    }
  }

  const IndexArgs& args_;
  const int64_t words_ = words_of<Dot>(args_.size);
};

// bf16 dot products (fp32 accumulation) if queries and keys allow it and the CPU has them; otherwise fp32.
inline void index_topk_any(const IndexArgs& args) {
#if defined(__AMX_BF16__)
  if (args.query_type == Dtype::kBFloat16 && args.key_type != Dtype::kFloat32) return IndexTopk<TileDot>(args).run();
#elif defined(__AVX512BF16__)
  if (args.query_type == Dtype::kBFloat16 && args.key_type != Dtype::kFloat32) return IndexTopk<Bf16Dot>(args).run();
#endif
  IndexTopk<Fp32Dot>(args).run();
}

}  // namespace
}  // namespace eprt
