// Divides matrix products among threads: a product is cut into pieces (rows x weight rows), which threads take one by
// one. The cut depends on sizes and thread count and never changes a value.
#include "cpu/gemm.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>
#include <vector>

#include "cpu/fp4.h"
#include "cpu/gemm_kernels.h"
#include "cpu/gemm_loops.h"
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

// Pieces of about equal width, `per_thread` for each thread if there is enough work.
Pieces pieces_for_team(const std::vector<RowGroup>& groups, int64_t columns, const GemmKernels& kernels,
                       int num_threads, int per_thread, int64_t max_width = kMaxColumns) {
  int64_t blocks = 0;
  for (const RowGroup& g : groups) blocks += ceil_div(g.rows, kernels.max_rows);
  const int64_t at_least = std::max<int64_t>(ceil_div(columns * blocks, kMaxColumns), 1);
  const int64_t pieces = ceil_div(at_least, num_threads * per_thread) * num_threads * per_thread;
  const int64_t even = ceil_div(columns * blocks, pieces * kernels.column_unit) * kernels.column_unit;
  return Pieces(groups, kernels.max_rows, columns, std::clamp<int64_t>(even, kernels.column_unit, max_width));
}

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

thread_local Scratch t_packed, t_inner, t_widened;

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

Packed packed_for(const Rows& x, int64_t rows, int64_t k, const GemmKernels& kernels, Scratch& scratch) {
  if (kernels.pack == nullptr) return {static_cast<char*>(const_cast<void*>(x.data)), x.stride * bytes_of(x.dtype)};
  const int64_t stride = kernels.packed_row_bytes(k);
  return {scratch.reserve(rows * stride), stride};
}

void pack_piece(const Pieces& pieces, int64_t id, const GemmKernels& kernels, const Rows& x, int64_t k,
                const Packed& packed) {
  const int64_t x_stride = x.stride * bytes_of(x.dtype);
  pieces.visit(id, [&](int64_t, int64_t row, int64_t rows, int64_t, int64_t) {
    kernels.pack(static_cast<const char*>(x.data) + row * x_stride, x_stride, rows, k,
                 packed.data + row * packed.stride, packed.stride);
  });
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

// Few rows: pieces of a product [rows, columns] that is one group.
Pieces linear_pieces(int64_t rows, int64_t columns, const GemmKernels& kernels, int team) {
  return pieces_for_team({{.matrix = 0, .row0 = 0, .rows = rows, .first_piece = 0}}, columns, kernels, team,
                         pieces_per_thread(columns, 1, rows, team));
}

Pieces expert_pieces(const std::vector<RowGroup>& groups, int64_t rows, const Matrix& w, int64_t columns,
                     int rows_per_column, const GemmKernels& kernels, int team) {
  const int per_thread = std::max(4, pieces_per_thread(columns, static_cast<int64_t>(groups.size()), rows, team));
  return pieces_for_team(groups, columns, kernels, team, per_thread, max_width(w, rows_per_column, kernels));
}

Rows skip(const Rows& x, int64_t rows) {
  return {static_cast<const char*>(x.data) + rows * x.stride * bytes_of(x.dtype), x.dtype, x.stride};
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

Pieces::Pieces(std::vector<RowGroup> groups, int64_t block_rows, int64_t columns, int64_t width)
    : groups_(std::move(groups)), block_rows_(block_rows), columns_(columns), width_(width) {
  for (RowGroup& g : groups_) {
    g.first_piece = count_;
    count_ += ceil_div(g.rows, block_rows_) * ceil_div(columns_, width_);
  }
}

const RowGroup& Pieces::group_of(int64_t id) const {
  const auto before = [](int64_t i, const RowGroup& g) { return i < g.first_piece; };
  return *std::prev(std::upper_bound(groups_.begin(), groups_.end(), id, before));
}

LinearLoop::LinearLoop(const Rows& x, int64_t m, const Matrix& w, const float* bias, void* y, int num_threads,
                       Scratch& packed)
    : kernels_(kernels_for(x.dtype, w.dtype)),
      x_(x),
      w_(w),
      bias_(bias),
      y_(y),
      team_(team_size(num_threads, m * w.n * w.k)),
      packs_(kernels_.pack != nullptr),
      row_blocks_({{.matrix = 0, .row0 = 0, .rows = m, .first_piece = 0}}, 16, 1, 1),
      pieces_(linear_pieces(m, w.n, kernels_, team_)),
      packed_(packed_for(x, m, w.k, kernels_, packed)) {}

void LinearLoop::pack(int64_t i) const { pack_piece(row_blocks_, i, kernels_, x_, w_.k, packed_); }

void LinearLoop::multiply(int64_t i) const {
  linear_piece(pieces_, i, kernels_, packed_, w_, {y_, x_.dtype, w_.n, bias_});
}

ExpertLoops::ExpertLoops(const std::vector<RowGroup>& groups, const Rows& x, int64_t rows, const Matrix& w13,
                         const Matrix& w2, void* y, int num_threads, Scratch& packed, Scratch& inner)
    : kernels_(kernels_for(x.dtype, w13.dtype == Dtype::kFp4 ? Dtype::kBFloat16 : w13.dtype)),
      x_(x),
      w13_(w13),
      w2_(w2),
      y_(y),
      team_(team_size(num_threads, rows * w2.n * w2.k)),
      packs_(kernels_.pack != nullptr),
      requantizes_(kernels_.requantize != nullptr),
      row_blocks_(groups, 16, 1, 1),
      gate_pieces_(expert_pieces(groups, rows, w13, w2.k, 2, kernels_, team_)),
      down_pieces_(expert_pieces(groups, rows, w2, w2.n, 1, kernels_, team_)),
      packed_(packed_for(x, rows, w13.k, kernels_, packed)),
      inner_{inner.reserve(rows * kernels_.packed_row_bytes(w2.k)), kernels_.packed_row_bytes(w2.k)} {}

void ExpertLoops::pack(int64_t i) const { pack_piece(row_blocks_, i, kernels_, x_, w13_.k, packed_); }

void ExpertLoops::gate_up(int64_t i) const {
  gate_pieces_.visit(i, [&](int64_t matrix, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const Piece piece{packed_.data + row * packed_.stride,
                      packed_.stride,
                      static_cast<int>(rows),
                      w13_.at(matrix),
                      column,
                      static_cast<int>(columns)};
    kernels_.gate_up(widened(piece, true), inner_.data + row * inner_.stride, inner_.stride);
  });
}

void ExpertLoops::requantize(int64_t i) const {
  row_blocks_.visit(i, [&](int64_t, int64_t row, int64_t rows, int64_t, int64_t) {
    kernels_.requantize(inner_.data + row * inner_.stride, rows, w2_.k);
  });
}

void ExpertLoops::down(int64_t i) const {
  linear_piece(down_pieces_, i, kernels_, inner_, w2_, {y_, x_.dtype, w2_.n, nullptr});
}

void linear(const Rows& x, int64_t m, const Matrix& w, const float* bias, void* y, int num_threads) {
  for (int64_t row0 = 0; row0 < m; row0 += kRowsAtOnce) {
    void* y_rows = static_cast<char*>(y) + row0 * w.n * bytes_of(x.dtype);
    const LinearLoop loop(skip(x, row0), std::min(kRowsAtOnce, m - row0), w, bias, y_rows, num_threads, t_packed);
    parallel_for(loop.num_packs(), loop.team(), [&](int64_t i) { loop.pack(i); });
    parallel_for(loop.num_pieces(), loop.team(), [&](int64_t i) { loop.multiply(i); });
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
      const ExpertLoops loops(groups, skip(x, row0), rows, w13, w2, y_rows, num_threads, t_packed, t_inner);
      parallel_for(loops.num_packs(), loops.team(), [&](int64_t i) { loops.pack(i); });
      parallel_for(loops.num_gate_ups(), loops.team(), [&](int64_t i) { loops.gate_up(i); });
      parallel_for(loops.num_requantizes(), loops.team(), [&](int64_t i) { loops.requantize(i); });
      parallel_for(loops.num_downs(), loops.team(), [&](int64_t i) { loops.down(i); });
    }
    row0 += rows;
  }
}

}  // namespace eprt
