// Matrix products as loops: what one index computes is said here, who runs it is left to the caller, who may put loops
// of several products into one (decode_layer.cpp). How a product is cut into indices never changes a value.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "cpu/gemm.h"

namespace eprt {

struct GemmKernels;

constexpr int64_t kRowsAtOnce =
    1024;  // bounds the scratch memory for packed activations and for the experts' inner rows

// Memory that grows to the largest size needed and is kept for the next call.
class Scratch {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_.reset();
      memory_.reset(static_cast<char*>(std::aligned_alloc(4096, size_)));
      if (!memory_) throw std::bad_alloc();
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

// Consecutive rows that share one weight matrix.
struct RowGroup {
  int64_t matrix;
  int64_t row0, rows;
  int64_t first_piece;  // pieces are numbered column by column, row blocks of a column side by side
};

// How the product of each group and its matrix [columns, k] is cut: blocks of rows by stretches of columns.
class Pieces {
 public:
  Pieces(std::vector<RowGroup> groups, int64_t block_rows, int64_t columns, int64_t width);

  int64_t count() const { return count_; }

  // Calls run(matrix, row, rows, column, columns) for piece `id`. Pieces of one stretch of weights are neighbours.
  template <class Run>
  void visit(int64_t id, Run&& run) const {
    const RowGroup& g = group_of(id);
    const int64_t blocks = (g.rows + block_rows_ - 1) / block_rows_;
    const int64_t row = (id - g.first_piece) % blocks * block_rows_, column = (id - g.first_piece) / blocks * width_;
    run(g.matrix, g.row0 + row, std::min(block_rows_, g.rows - row), column, std::min(width_, columns_ - column));
  }

 private:
  const RowGroup& group_of(int64_t id) const;

  std::vector<RowGroup> groups_;
  int64_t block_rows_, columns_, width_, count_ = 0;
};

// Activations in the layout that the kernels read: row r at data + r * stride.
struct Packed {
  char* data;
  int64_t stride;
};

// y = x W^T + bias of at most kRowsAtOnce rows: first every pack(), if there are any, then every multiply().
class LinearLoop {
 public:
  // packed: memory of this product alone until it is computed.
  LinearLoop(const Rows& x, int64_t m, const Matrix& w, const float* bias, void* y, int num_threads, Scratch& packed);

  int team() const { return team_; }  // threads that the product is worth
  int64_t num_packs() const { return packs_ ? row_blocks_.count() : 0; }
  int64_t num_pieces() const { return pieces_.count(); }
  void pack(int64_t i) const;
  void multiply(int64_t i) const;

 private:
  const GemmKernels& kernels_;
  const Rows x_;
  const Matrix w_;
  const float* bias_;
  void* y_;
  const int team_;
  const bool packs_;
  const Pieces row_blocks_, pieces_;
  const Packed packed_;
};

// The products of experts for their rows, at most kRowsAtOnce: every pack(), if there are any, every gate_up(), every
// requantize(), if there are any, every down().
class ExpertLoops {
 public:
  // groups: the rows of each expert that has any, in order from row 0 on.
  ExpertLoops(const std::vector<RowGroup>& groups, const Rows& x, int64_t rows, const Matrix& w13, const Matrix& w2,
              void* y, int num_threads, Scratch& packed, Scratch& inner);

  int team() const { return team_; }
  int64_t num_packs() const { return packs_ ? row_blocks_.count() : 0; }
  int64_t num_gate_ups() const { return gate_pieces_.count(); }
  int64_t num_requantizes() const { return requantizes_ ? row_blocks_.count() : 0; }
  int64_t num_downs() const { return down_pieces_.count(); }
  void pack(int64_t i) const;
  void gate_up(int64_t i) const;
  void requantize(int64_t i) const;
  void down(int64_t i) const;

 private:
  const GemmKernels& kernels_;
  const Rows x_;
  const Matrix w13_, w2_;
  void* y_;
  const int team_;
  const bool packs_, requantizes_;
  const Pieces row_blocks_, gate_pieces_, down_pieces_;
  const Packed packed_, inner_;
};

}  // namespace eprt
