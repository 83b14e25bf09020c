// AMX: bfloat16 activations times bfloat16, fp8 or int8 weights. Products with a float32 operand use the AVX-512
// kernels.
//
// A tile instruction computes C[16][16] += A[16][32] B[32][16]. A is weight rows in their layout in memory, so weights
// need no repacking. B is activations, packed once: in blocks of up to 16 rows, elements k and k + 1 of all rows side
// by side. The sums C are therefore transposed, [column of y][row of y], and so is the packed layout: the SiLU of two
// neighbouring rows of C is one line of the next product's B.
//
// tdpbf16ps adds the products of its even and of its odd elements separately, in order, then both to C: in fp32,
// rounding to nearest even, subnormals as zero. No other row of x takes part, so the order is the same for every row.
// int8 and e4m3 weights are exact in bf16; an fp8 block's scale multiplies the block's fp32 sums.
#ifdef EPRT_EMULATE_AMX
#include "cpu/amx_emulation.h"
#else
#include <immintrin.h>
#endif

#include <memory>

#include "cpu/gemm_bf16x32.h"
#include "cpu/gemm_epilogue.h"

namespace eprt {
namespace {

constexpr int kTileRows = 16;           // rows of every tile, columns of C
constexpr int kTileDepth = 32;          // elements of K in a tile
constexpr int kMaxRows = 256;           // of a piece
constexpr int kStripe = 2 * kTileRows;  // weight rows multiplied side by side
// A stripe's stretch of K: for many rows, 32 KB of dequantised weights that stay in L1; for few rows, long runs of
// memory.
constexpr int64_t kDepth = 512, kLongDepth = 2048;

struct alignas(64) Workspace {
  float sums[2][kMaxColumns][kMaxRows];                            // transposed; [1]: up projection
  float rows[kTileRows][kMaxColumns];                              // sums of one row block, not transposed
  float block[4][kTileRows][kTileRows];                            // C tiles of one fp8 block
  bf16 stripe[kLongDepth / kTileDepth][2][kTileRows][kTileDepth];  // A tiles
};

Workspace& workspace() {
  static thread_local const std::unique_ptr<Workspace> space(new Workspace());
  return *space;
}

// ---- tile registers -------------------------------------------------------------------------------------------------
// C: tiles 0 and 1 (weight rows 0-15 and 16-31 of the stripe) for the first row block, 2 and 3 for the second. A: 4
// and 5. B: 6 and 7.

// GCC's tile intrinsics do not declare which memory they read. This makes earlier stores to *p visible to them.
inline void settle(const void* p) { asm volatile("" ::"r"(p) : "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Configures the tiles for row blocks of `rows0` and `rows1` activations (rows1: 0 if there is one block).
void configure(int rows0, int rows1) {
  TileConfig config{.palette = 1, .start_row = 0, .reserved = {}, .row_bytes = {}, .rows = {}};
  const int width[8] = {rows0, rows0, rows1, rows1, kTileRows, kTileRows, rows0, rows1};
  for (int t = 0; t < 8; ++t) {
    if (width[t] == 0) continue;
    config.row_bytes[t] = static_cast<uint16_t>(width[t] * 4);
    config.rows[t] = kTileRows;
  }
  settle(&config);
  _tile_loadconfig(&config);
}

// A tiles of a stripe: the s-th kTileDepth elements are at first + s * step, weight rows 16-31 `second` bytes further.
struct Stripe {
  const char* first;
  int64_t row_stride, step, second;
};

// B tiles of a block of `rows` activations: elements from k on are at data + k * rows * 2.
struct RowBlock {
  const char* data;
  int rows;

  const char* at(int64_t k) const { return data + k * rows * 2; }
  int64_t stride() const { return rows * 4; }
};

// C += the next `steps` A tiles times B tiles. PREFETCH: also fetches the stripe that lies `ahead` bytes further.
template <bool TWO_BLOCKS, bool PREFETCH>
void multiply_tiles(const Stripe& w, int64_t ahead, const RowBlock& x0, const RowBlock& x1, int64_t k, int steps) {
  const char *a = w.first, *b0 = x0.at(k), *b1 = x1.at(k);
  const int64_t stride0 = x0.stride(), stride1 = x1.stride();
  for (int s = 0; s < steps; ++s, a += w.step, b0 += kTileRows * stride0, b1 += kTileRows * stride1) {
    if constexpr (PREFETCH) {
      for (int r = 0; r < kStripe; ++r) __builtin_prefetch(a + ahead + r * w.row_stride, 0, 2);
    }
    _tile_loadd(6, b0, stride0);
    _tile_loadd(4, a, w.row_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + w.second, w.row_stride);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (TWO_BLOCKS) {
      _tile_loadd(7, b1, stride1);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

void load_sums(const float* sums, bool two_blocks) {
  constexpr int64_t kStride = kMaxRows * sizeof(float);
  settle(sums);
  _tile_loadd(0, sums, kStride);
  _tile_loadd(1, sums + kTileRows * kMaxRows, kStride);
  if (!two_blocks) return;
  _tile_loadd(2, sums + kTileRows, kStride);
  _tile_loadd(3, sums + kTileRows * kMaxRows + kTileRows, kStride);
}

void store_sums(float* sums, bool two_blocks) {
  constexpr int64_t kStride = kMaxRows * sizeof(float);
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kTileRows * kMaxRows, kStride);
  if (!two_blocks) return;
  _tile_stored(2, sums + kTileRows, kStride);
  _tile_stored(3, sums + kTileRows * kMaxRows + kTileRows, kStride);
}

// ---- a piece: transposed sums ---------------------------------------------------------------------------------------

// Computes the product of a piece and weight rows [row0, row0 + n), without int8 row scales, in sums[n][m].
template <class W>
class Product {
 public:
  Product(const Piece& piece, int64_t row0, float (&sums)[kMaxColumns][kMaxRows])
      : piece_(piece), row0_(row0), sums_(sums), space_(workspace()) {}

  void run() {
    const int64_t clear_bytes = round_up(piece_.m, kTileRows) * sizeof(float);
    for (int n = 0; n < piece_.n; n += kStripe) {
      for (int r = 0; r < kStripe; ++r) std::memset(sums_[n + r], 0, clear_bytes);
      int64_t k = 0;
      if (in_place(n)) k = multiply_in_place(n);
      const int64_t depth = piece_.m <= 2 * kTileRows ? kLongDepth : kDepth;
      for (; k < piece_.w.k; k += depth) {
        const int steps = static_cast<int>(div_up(min_of(depth, piece_.w.k - k), kTileDepth));
        multiply(n, k, steps, dequantize(n, k, steps));
      }
    }
  }

 private:
  // bf16 weights are read in place if only one pair of row blocks needs them.
  bool in_place(int n) const {
    return std::is_same_v<W, bf16> && piece_.m <= 2 * kTileRows && n + kStripe <= piece_.n && piece_.w.k >= kTileDepth;
  }

  // Multiplies all whole tiles; returns how many elements of K they cover.
  int64_t multiply_in_place(int n) {
    const int64_t row_stride = piece_.w.k * sizeof(W);
    const Stripe stripe{reinterpret_cast<const char*>(row(n)), row_stride, kTileDepth * sizeof(W),
                        kTileRows * row_stride};
    const int64_t ahead = n + 2 * kStripe <= piece_.n ? kStripe * row_stride : 0;
    const int steps = static_cast<int>(piece_.w.k / kTileDepth);
    const RowBlock x0 = block(0), x1 = block(kTileRows);
    shape_tiles(x0.rows, x1.rows);
    load_sums(sums_[n], x1.rows > 0);
    x1.rows > 0 ? multiply_tiles<true, true>(stripe, ahead, x0, x1, 0, steps)
                : multiply_tiles<false, true>(stripe, ahead, x0, x1, 0, steps);
    store_sums(sums_[n], x1.rows > 0);
    return steps * kTileDepth;
  }

  // Converts a stripe's weights from element k on to A tiles; zeros past the piece's rows and past the end of K.
  Stripe dequantize(int n, int64_t k, int steps) {
    const int64_t depth = min_of<int64_t>(steps * kTileDepth, piece_.w.k - k);
    const int64_t ahead = n + 2 * kStripe <= piece_.n ? kStripe * piece_.w.k : 0;
    for (int r = 0; r < kStripe; ++r) {
      const W* w = n + r < piece_.n ? row(n + r) + k : nullptr;
      for (int s = 0; s < steps; ++s) {
        const int64_t i = s * kTileDepth;
        __m512i value = _mm512_setzero_si512();
        if (w != nullptr && i + kTileDepth <= depth) {
          if (i % (64 / sizeof(W)) == 0) __builtin_prefetch(w + i + ahead, 0, 2);
          value = load_bf16x32(w + i);
        } else if (w != nullptr) {
          W padded[kTileDepth] = {};
          std::memcpy(padded, w + i, (depth - i) * sizeof(W));
          value = load_bf16x32(padded);
        }
        _mm512_store_si512(space_.stripe[s][r / kTileRows][r % kTileRows], value);
      }
    }
    return {reinterpret_cast<const char*>(space_.stripe), sizeof(space_.stripe[0][0][0]), sizeof(space_.stripe[0]),
            sizeof(space_.stripe[0][0])};
  }

  // Multiplies all rows of the piece by a stripe's elements [k, k + steps * kTileDepth).
  void multiply(int n, int64_t k, int steps, const Stripe& stripe) {
    for (int m = 0; m < piece_.m; m += 2 * kTileRows) {
      const RowBlock x0 = block(m), x1 = block(m + kTileRows);
      shape_tiles(x0.rows, x1.rows);
      if constexpr (std::is_same_v<W, fp8>) {
        multiply_blocks(n, m, k, steps, stripe, x0, x1);
      } else {
        load_sums(&sums_[n][m], x1.rows > 0);
        settle(space_.stripe);
        multiply_steps(stripe, x0, x1, k, steps);
        store_sums(&sums_[n][m], x1.rows > 0);
      }
    }
  }

  // The same, one fp8 block of K after another.
  void multiply_blocks(int n, int m, int64_t k, int steps, Stripe stripe, const RowBlock& x0, const RowBlock& x1) {
    constexpr int kBlockSteps = kFp8Block / kTileDepth;
    for (; steps > 0; steps -= kBlockSteps, k += kFp8Block, stripe.first += kBlockSteps * stripe.step) {
      settle(space_.stripe);
      _tile_zero(0);
      _tile_zero(1);
      if (x1.rows > 0) {
        _tile_zero(2);
        _tile_zero(3);
      }
      multiply_steps(stripe, x0, x1, k, min_of(steps, kBlockSteps));
      _tile_stored(0, space_.block[0], sizeof(space_.block[0][0]));
      _tile_stored(1, space_.block[1], sizeof(space_.block[0][0]));
      if (x1.rows > 0) {
        _tile_stored(2, space_.block[2], sizeof(space_.block[0][0]));
        _tile_stored(3, space_.block[3], sizeof(space_.block[0][0]));
      }
      add_block(n, m, k / kFp8Block, x1.rows > 0 ? 4 : 2);
    }
  }

  // sums += scale * the tiles of one fp8 block.
  void add_block(int n, int m, int64_t k_block, int tiles) {
    const int64_t k_blocks = div_up(piece_.w.k, kFp8Block);
    for (int r = 0; r < min_of(kStripe, piece_.n - n); ++r) {
      const Vec scale = set1(piece_.w.scale[(row0_ + n + r) / kFp8Block * k_blocks + k_block]);
      for (int t = r / kTileRows; t < tiles; t += 2) {
        float* sum = &sums_[n + r][m + t / 2 * kTileRows];
        store(sum, fma(load(space_.block[t][r % kTileRows]), scale, load(sum)));
      }
    }
  }

  void multiply_steps(const Stripe& stripe, const RowBlock& x0, const RowBlock& x1, int64_t k, int steps) {
    x1.rows > 0 ? multiply_tiles<true, false>(stripe, 0, x0, x1, k, steps)
                : multiply_tiles<false, false>(stripe, 0, x0, x1, k, steps);
  }

  void shape_tiles(int rows0, int rows1) {
    if (rows0 == shape_[0] && rows1 == shape_[1]) return;
    configure(rows0, rows1);
    shape_[0] = rows0, shape_[1] = rows1;
  }

  const W* row(int n) const { return static_cast<const W*>(piece_.w.data) + (row0_ + n) * piece_.w.k; }

  RowBlock block(int m) const {
    return {static_cast<const char*>(piece_.x) + m * piece_.x_stride, max_of(0, min_of(kTileRows, piece_.m - m))};
  }

  const Piece& piece_;
  const int64_t row0_;
  float (&sums_)[kMaxColumns][kMaxRows];
  Workspace& space_;
  int shape_[2] = {-1, -1};
};

void multiply(const Piece& piece, int64_t row0, float (&sums)[kMaxColumns][kMaxRows]) {
  switch (piece.w.dtype) {
    case Dtype::kBFloat16:
      Product<bf16>(piece, row0, sums).run();
      break;
    case Dtype::kFp8E4M3:
      Product<fp8>(piece, row0, sums).run();
      break;
    default:
      Product<int8_t>(piece, row0, sums).run();
  }
  _tile_release();
}

// ---- packed activations ---------------------------------------------------------------------------------------------

// Transposes rows of 32-bit elements to columns.
void transpose_16x16(__m512i (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 4) {
    const __m512i ab_low = _mm512_unpacklo_epi32(v[i], v[i + 1]), ab_high = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    const __m512i cd_low = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]);
    const __m512i cd_high = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
    t[i] = _mm512_unpacklo_epi64(ab_low, cd_low);
    t[i + 1] = _mm512_unpackhi_epi64(ab_low, cd_low);
    t[i + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
    t[i + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
  }
  for (int i = 0; i < 4; ++i) {  // t[4 q + i]: rows 4 q .. 4 q + 3 of columns i, i + 4, i + 8, i + 12
    const __m512i low_even = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    const __m512i high_even = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
    v[i] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(low_even, high_even, 0xdd);
    v[i + 4] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    v[i + 12] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
}

int64_t packed_row_bytes(int64_t k) { return round_up(k, kTileDepth) * sizeof(bf16); }

// Packs one block of m <= 16 rows: pairs (k, k + 1) of all rows side by side, zeros up to a whole tile.
void pack(const void* x, int64_t x_stride, int64_t m, int64_t k, void* packed, int64_t) {
  const char* in = static_cast<const char*>(x);
  char* out = static_cast<char*>(packed);
  for (int64_t done = 0; done < k; done += kTileDepth) {
    const __mmask32 present = done + kTileDepth <= k ? ~0u : (1u << (k - done)) - 1;
    __m512i v[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      v[r] =
          r < m ? _mm512_maskz_loadu_epi16(present, in + r * x_stride + done * sizeof(bf16)) : _mm512_setzero_si512();
    }
    transpose_16x16(v);
    for (int p = 0; p < kTileRows; ++p) _mm512_mask_storeu_epi32(out + (done / 2 + p) * m * 4, lanes(m), v[p]);
  }
}

// ---- the two operations ---------------------------------------------------------------------------------------------

void linear(const Piece& piece, const Output& out) {
  Workspace& space = workspace();
  multiply(piece, piece.n0, space.sums[0]);
  for (int m = 0; m < piece.m; m += kTileRows) {
    for (int n = 0; n < piece.n; n += kTileRows) {
      __m512i v[kTileRows];
      for (int r = 0; r < kTileRows; ++r) v[r] = _mm512_load_si512(&space.sums[0][n + r][m]);
      transpose_16x16(v);
      for (int r = 0; r < kTileRows; ++r) _mm512_store_si512(&space.rows[r][n], v[r]);
    }
    Piece block = piece;
    block.m = min_of(kTileRows, piece.m - m);
    Output block_out = out;
    block_out.y = static_cast<char*>(out.y) + m * out.stride * sizeof(bf16);
    store_linear(space.rows[0], kMaxColumns, block, block_out);
  }
}

// Rounds and interleaves a and b, 16 values each: a0 b0 a1 b1 ...
__m512i to_bf16_pairs(Vec a, Vec b) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a.v));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(b.v));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

void gate_up(const Piece& piece, void* h, int64_t h_stride) {
  Workspace& space = workspace();
  const int64_t inner = piece.w.n / 2;
  multiply(piece, piece.n0, space.sums[0]);
  multiply(piece, inner + piece.n0, space.sums[1]);
  const float* gate_scale = row_scale(piece.w, piece.n0);
  const float* up_scale = row_scale(piece.w, inner + piece.n0);
  const bool last = piece.n0 + piece.n == inner;
  const int64_t end = last ? round_up(inner, kTileDepth) - piece.n0 : piece.n;  // zeros up to a whole tile
  for (int m = 0; m < piece.m; m += kTileRows) {
    const int rows = min_of(kTileRows, piece.m - m);
    const auto value = [&](int64_t n) {
      if (n >= piece.n) return zero();
      const Vec gate = load(&space.sums[0][n][m]), up = load(&space.sums[1][n][m]);
      const float limit = piece.w.limit;
      return gate_scale == nullptr ? swiglu(gate, up, limit)
                                   : swiglu(gate * set1(gate_scale[n]), up * set1(up_scale[n]), limit);
    };
    char* block = static_cast<char*>(h) + m * h_stride;
    for (int64_t n = 0; n < end; n += 2) {
      _mm512_mask_storeu_epi32(block + (piece.n0 + n) * rows * 2, lanes(rows), to_bf16_pairs(value(n), value(n + 1)));
    }
  }
}

constexpr GemmKernels kKernels{packed_row_bytes, pack, linear, gate_up, kMaxRows, kStripe};

}  // namespace

const GemmKernels& gemm_kernels_amx(Dtype x, Dtype w) {
  const bool tiles = x == Dtype::kBFloat16 && w != Dtype::kFloat32;
  return tiles ? kKernels : gemm_kernels_avx512(x, w);
}

}  // namespace eprt
