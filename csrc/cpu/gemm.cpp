// Divides matrix products among threads: a product is cut into pieces (rows x weight rows), which threads take one by
// one. The cut depends on sizes and thread count and never changes a value.
#include "cpu/gemm.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "cpu/fp4.h"
#include "cpu/gemm_kernels.h"
#include "cpu/isa.h"
#include "cpu/team.h"

namespace eprt {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kBFloat16 ? 2 : 1; }

std::atomic<bool> g_emulate_amx{false};

const GemmKernels& kernels_for(Dtype x, Dtype w) {
  switch (cpu_isa()) {
    case Isa::kAmx:
      return gemm_kernels_amx(x, w);
    case Isa::kAvx512:
      return g_emulate_amx ? gemm_kernels_amx_emulated(x, w) : gemm_kernels_avx512(x, w);
    case Isa::kAvx2:
      return gemm_kernels_avx2(x, w);
    default:
      return gemm_kernels_scalar(x, w);
  }
}

// Memory that grows to the largest size needed and is kept for the next call.
class Scratch {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      size_ = ceil_div(bytes, 4096) * 4096;
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
  Pieces(std::vector<RowGroup> groups, int64_t block_rows, int64_t columns, int64_t width)
      : groups_(std::move(groups)), block_rows_(block_rows), columns_(columns), width_(width) {
    for (RowGroup& g : groups_) {
      g.first_piece = count_;
      count_ += ceil_div(g.rows, block_rows_) * ceil_div(columns_, width_);
    }
  }

  // Pieces of about equal width, `per_thread` for each thread if there is enough work.
  static Pieces for_team(const std::vector<RowGroup>& groups, int64_t columns, const GemmKernels& kernels,
                         int num_threads, int per_thread, int64_t max_width = kMaxColumns) {
    int64_t blocks = 0;
    for (const RowGroup& g : groups) blocks += ceil_div(g.rows, kernels.max_rows);
    const int64_t at_least = std::max<int64_t>(ceil_div(columns * blocks, kMaxColumns), 1);
    const int64_t pieces = ceil_div(at_least, num_threads * per_thread) * num_threads * per_thread;
    const int64_t even = ceil_div(columns * blocks, pieces * kernels.column_unit) * kernels.column_unit;
    return Pieces(groups, kernels.max_rows, columns, std::clamp<int64_t>(even, kernels.column_unit, max_width));
  }

  int64_t count() const { return count_; }

  // Calls run(matrix, row, rows, column, columns) for piece `id`. Pieces of one stretch of weights are neighbours.
  template <class Run>
  void visit(int64_t id, Run&& run) const {
    const auto before = [](int64_t i, const RowGroup& g) { return i < g.first_piece; };
    const RowGroup& g = *std::prev(std::upper_bound(groups_.begin(), groups_.end(), id, before));
    const int64_t blocks = ceil_div(g.rows, block_rows_);
    const int64_t row = (id - g.first_piece) % blocks * block_rows_, column = (id - g.first_piece) / blocks * width_;
    run(g.matrix, g.row0 + row, std::min(block_rows_, g.rows - row), column, std::min(width_, columns_ - column));
  }

 private:
  std::vector<RowGroup> groups_;
  int64_t block_rows_, columns_, width_, count_ = 0;
};

// Less work than this is done before a team of threads has started.
int team_size(int num_threads, int64_t multiply_adds) {
  return multiply_adds < (1 << 18) ? 1 : std::max(num_threads, 1);
}

// How many pieces each thread should get of columns * blocks, so that one that is late keeps the others from little.
// Few rows are bound by memory, where shorter pieces cost nothing and leave less to wait for at the end.
int pieces_per_thread(int64_t columns, int64_t blocks, int64_t rows, int team) {
  const bool few = rows <= 32 * blocks;
  const int64_t shortest = few ? 32 : 64, most = few ? 16 : 4;  // columns, pieces
  return static_cast<int>(std::clamp<int64_t>(columns * blocks / (team * shortest), 1, most));
}

// Bounds the scratch memory for packed activations and for the experts' intermediate.
constexpr int64_t kRowsAtOnce = 1024;

// Activations in the layout that the kernels read: row r at data + r * stride.
struct Packed {
  char* data;
  int64_t stride;

  static Packed for_rows(const Rows& x, int64_t rows, int64_t k, const GemmKernels& kernels, Scratch& scratch) {
    if (kernels.pack == nullptr) {
      return {static_cast<char*>(const_cast<void*>(x.data)), x.stride * bytes_of(x.dtype)};
    }
    const int64_t stride = kernels.packed_row_bytes(k);
    return {scratch.reserve(rows * stride), stride};
  }
};

void pack_piece(const Pieces& pieces, int64_t id, const GemmKernels& kernels, const Rows& x, int64_t k,
                const Packed& packed) {
  const int64_t x_stride = x.stride * bytes_of(x.dtype);
  pieces.visit(id, [&](int64_t, int64_t row, int64_t rows, int64_t, int64_t) {
    kernels.pack(static_cast<const char*>(x.data) + row * x_stride, x_stride, rows, k,
                 packed.data + row * packed.stride, packed.stride);
  });
}

thread_local Scratch t_packed, t_intermediate, t_widened;

constexpr int64_t kWidenedBytes = 1 << 19;  // of one piece of fp4 weights: they stay in a core's cache

// The most columns of a piece that has so many rows of w for each.
int64_t max_width(const Matrix& w, int rows_per_column, const GemmKernels& kernels) {
  if (w.dtype != Dtype::kFp4) return kMaxColumns;
  const int64_t columns = kWidenedBytes / (rows_per_column * w.k * static_cast<int64_t>(sizeof(bf16)));
  const int64_t unit = kernels.column_unit;
  return std::clamp<int64_t>(columns / unit * unit, unit, kMaxColumns);
}

// The same piece of bfloat16 weights, where these are fp4. ups: of a SwiGLU's first product.
Piece widened(Piece piece, bool ups) {
  if (piece.w.dtype != Dtype::kFp4) return piece;
  const int64_t k = piece.w.k, values = piece.n * k;
  auto* out = reinterpret_cast<bf16*>(t_widened.reserve((ups ? 2 : 1) * values * sizeof(bf16)));
  const auto widen = [&](int64_t row, bf16* to) {
    fp4_to_bf16(static_cast<const uint8_t*>(piece.w.data) + row * k / 2, piece.w.exponent + row * (k / kFp4Block),
                values / kFp4Block, to);
  };
  widen(piece.row, out);
  if (ups) widen(piece.up_row, out + values);
  piece.w.data = out;
  piece.w.dtype = Dtype::kBFloat16;
  piece.row = 0;
  piece.up_row = piece.n;
  return piece;
}

void linear_piece(const Pieces& pieces, int64_t id, const GemmKernels& kernels, const Packed& x, const Matrix& w,
                  Output out) {
  pieces.visit(id, [&](int64_t matrix, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    out.y = static_cast<char*>(out.y) + row * out.stride * bytes_of(out.dtype);
    const Piece piece{x.data + row * x.stride,  x.stride, static_cast<int>(rows), w.at(matrix), column,
                      static_cast<int>(columns)};
    kernels.linear(widened(piece, false), out);
  });
}

void gate_up_piece(const Pieces& pieces, int64_t id, const GemmKernels& kernels, const Packed& x, const Matrix& w13,
                   const Packed& h) {
  pieces.visit(id, [&](int64_t matrix, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const Piece piece{x.data + row * x.stride, x.stride, static_cast<int>(rows),
                      w13.at(matrix),          column,   static_cast<int>(columns)};
    kernels.gate_up(widened(piece, true), h.data + row * h.stride, h.stride);
  });
}

void requantize_piece(const Pieces& pieces, int64_t id, const GemmKernels& kernels, int64_t k, const Packed& h) {
  pieces.visit(id, [&](int64_t, int64_t row, int64_t rows, int64_t, int64_t) {
    kernels.requantize(h.data + row * h.stride, rows, k);
  });
}

Rows skip(const Rows& x, int64_t rows) {
  return {static_cast<const char*>(x.data) + rows * x.stride * bytes_of(x.dtype), x.dtype, x.stride};
}

// Groups of consecutive experts; row0 counts from the first row of the first of them.
void run_experts(const std::vector<RowGroup>& groups, const Rows& x, int64_t rows, const Matrix& w13, const Matrix& w2,
                 void* y, int num_threads) {
  const GemmKernels& kernels = kernels_for(x.dtype, w13.dtype == Dtype::kFp4 ? Dtype::kBFloat16 : w13.dtype);
  const int team = team_size(num_threads, rows * w2.n * w2.k);
  const Pieces row_blocks(groups, 16, 1, 1);
  const auto per_thread = [&](int64_t columns) {
    return std::max(4, pieces_per_thread(columns, static_cast<int64_t>(groups.size()), rows, team));
  };
  const Pieces gate_pieces =
      Pieces::for_team(groups, w2.k, kernels, team, per_thread(w2.k), max_width(w13, 2, kernels));
  const Pieces down_pieces = Pieces::for_team(groups, w2.n, kernels, team, per_thread(w2.n), max_width(w2, 1, kernels));
  const Packed packed = Packed::for_rows(x, rows, w13.k, kernels, t_packed);
  const int64_t h_stride = kernels.packed_row_bytes(w2.k);
  const Packed h{t_intermediate.reserve(rows * h_stride), h_stride};
  const Output out{y, x.dtype, w2.n, nullptr};
  if (kernels.pack != nullptr) {
    parallel_for(row_blocks.count(), team, [&](int64_t i) { pack_piece(row_blocks, i, kernels, x, w13.k, packed); });
  }
  parallel_for(gate_pieces.count(), team, [&](int64_t i) { gate_up_piece(gate_pieces, i, kernels, packed, w13, h); });
  if (kernels.requantize != nullptr) {
    parallel_for(row_blocks.count(), team, [&](int64_t i) { requantize_piece(row_blocks, i, kernels, w2.k, h); });
  }
  parallel_for(down_pieces.count(), team, [&](int64_t i) { linear_piece(down_pieces, i, kernels, h, w2, out); });
}

}  // namespace

void emulate_amx(bool on) { g_emulate_amx = on; }

Matrix Matrix::at(int64_t e) const {
  Matrix one = *this;
  one.data = static_cast<const char*>(data) + (dtype == Dtype::kFp4 ? e * n * k / 2 : e * n * k * bytes_of(dtype));
  one.exponent = exponent == nullptr ? nullptr : exponent + e * n * (k / kFp4Block);
  const int64_t scales = dtype == Dtype::kFp8E4M3 ? ceil_div(n, kFp8Block) * ceil_div(k, kFp8Block) : n;
  one.scale = scale == nullptr ? nullptr : scale + e * scales;
  return one;
}

void linear(const Rows& x, int64_t m, const Matrix& w, const float* bias, void* y, int num_threads) {
  const GemmKernels& kernels = kernels_for(x.dtype, w.dtype);
  for (int64_t row0 = 0; row0 < m; row0 += kRowsAtOnce) {
    const int64_t rows = std::min(kRowsAtOnce, m - row0);
    const int team = team_size(num_threads, rows * w.n * w.k);
    const std::vector<RowGroup> groups{{.matrix = 0, .row0 = 0, .rows = rows, .first_piece = 0}};
    const Pieces row_blocks(groups, 16, 1, 1);
    const int per_thread = pieces_per_thread(w.n, 1, rows, team);
    const Pieces pieces = Pieces::for_team(groups, w.n, kernels, team, per_thread);
    const Rows x_rows = skip(x, row0);
    const Packed packed = Packed::for_rows(x_rows, rows, w.k, kernels, t_packed);
    const Output out{static_cast<char*>(y) + row0 * w.n * bytes_of(x.dtype), x.dtype, w.n, bias};
    if (kernels.pack != nullptr) {
      parallel_for(row_blocks.count(), team,
                   [&](int64_t i) { pack_piece(row_blocks, i, kernels, x_rows, w.k, packed); });
    }
    parallel_for(pieces.count(), team, [&](int64_t i) { linear_piece(pieces, i, kernels, packed, w, out); });
  }
}

void grouped_experts(const Rows& x, const int32_t* count, int64_t num_experts, const int32_t* matrix_of_expert,
                     const Matrix& w13, const Matrix& w2, void* y, int num_threads) {
  int64_t row0 = 0;
  for (int64_t e = 0; e < num_experts;) {
    std::vector<RowGroup> groups;
    int64_t rows = 0;
    for (; e < num_experts && (rows == 0 || rows + count[e] <= kRowsAtOnce); ++e) {
      const int64_t matrix = matrix_of_expert == nullptr ? e : matrix_of_expert[e];
      if (count[e] > 0) groups.push_back({.matrix = matrix, .row0 = rows, .rows = count[e], .first_piece = 0});
      rows += count[e];
    }
    if (rows > 0) {
      char* y_rows = static_cast<char*>(y) + row0 * w2.n * bytes_of(x.dtype);
      run_experts(groups, skip(x, row0), rows, w13, w2, y_rows, num_threads);
    }
    row0 += rows;
  }
}

}  // namespace eprt
