// AVX-512: fp32 arithmetic for float32 activations or weights, bf16 dot products otherwise.
//
// vdpbf16ps multiplies exactly and adds in fp32, rounding to nearest even like an FMA but reading and writing
// subnormals as zero. int8 and e4m3 weights are exact in bf16; their scales multiply fp32 sums.
#include <immintrin.h>

#include "cpu/gemm_bf16x32.h"
#include "cpu/gemm_block.h"

namespace eprt {
namespace {

__m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
__m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

struct Avx512Sums {
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }

  // From vectors a b c d to [a b c d] in each 128-bit lane; the lanes are still to be added.
  static __m512 reduce_4(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }

  static __m512 add_lanes(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }

  // The lane sums of sums[0..15] in one vector; those from `count` on count as zero.
  static __m512 reduce_16(const Sum* sums, int count) {
    __m512 quad[4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const auto at = [&](int i) { return 4 * q + i < count ? sums[4 * q + i] : zero(); };
      quad[q] = 4 * q < count ? reduce_4(at(0), at(1), at(2), at(3)) : zero();
    }
    return add_lanes(add_lanes(quad[0], quad[1]), add_lanes(quad[2], quad[3]));
  }

  template <int ROWS, int COLS>
  static void add_reduced(const Sum* sums, float* out, int64_t ld) {
    alignas(64) float reduced[(ROWS * COLS + 15) / 16 * 16];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS * COLS; i += 16) _mm512_store_ps(reduced + i, reduce_16(sums + i, ROWS * COLS - i));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < COLS; ++c) out[r * ld + c] += reduced[r * COLS + c];
    }
  }
};

struct Avx512FloatMath : Avx512Sums {
  using X = float;
  using Operand = __m512;
  static constexpr int kStep = 16;
  static constexpr int kDirectRows = 8;
  static constexpr bool kFoldsScale = true;
  template <class W>
  static constexpr bool kPairs = false;
  static constexpr TileShape kTile{4, 6}, kScaledTile = kTile;
  static constexpr int direct_columns(int rows, bool) {
    constexpr int kColumns[] = {0, 4, 8, 8, 6};
    return rows <= 4 ? kColumns[rows] : 0;
  }

  static Operand load(const float* p) { return _mm512_loadu_ps(p); }
  static Operand load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(p))); }
  static Operand load(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16));
  }
  // Through fp16, as in gemm_avx2.cpp.
  static Operand load_scaled(const fp8* p, float scale) {
    const __m256i wide = _mm256_cvtepi8_epi16(load_128(p));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, nan)), _mm512_set1_ps(scale * 0x1p8f));
  }
  static void store(float* p, Operand v) { _mm512_storeu_ps(p, v); }
  static Sum mul_add(Operand x, Operand w, Sum sum) { return _mm512_fmadd_ps(x, w, sum); }
};

struct Avx512DotMath : Avx512Sums {
  using X = bf16;
  using Operand = __m512i;
  static constexpr int kStep = 32;
  static constexpr int kDirectRows = 8;
  static constexpr bool kFoldsScale = false;
  template <class W>
  static constexpr bool kPairs = sizeof(W) == 1;
  static constexpr TileShape kTile{3, 8}, kScaledTile{4, 3};
  static constexpr int direct_columns(int rows, bool scaled_sums) {
    constexpr int kColumns[] = {0, 4, 8, 8, 6, 4, 4, 3, 3}, kScaledColumns[] = {0, 4, 4, 3};
    if (scaled_sums) return rows <= 3 ? kScaledColumns[rows] : 0;
    return rows <= 8 ? kColumns[rows] : 0;
  }

  template <class W>
  static Operand load(const W* p) {
    return load_bf16x32(p);
  }
  template <class W>
  static void load_pair(const W* p, const float*, Operand& first, Operand& second) {
    load_bf16x64(p, first, second);
  }
  static void store(bf16* p, Operand v) { _mm512_storeu_si512(p, v); }

  static Sum mul_add(Operand x, Operand w, Sum sum) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
  static Sum add_scaled(Sum total, Sum sum, float scale) { return _mm512_fmadd_ps(sum, _mm512_set1_ps(scale), total); }
};

}  // namespace

const GemmKernels& gemm_kernels_avx512(Dtype x, Dtype w) {
  using Dot = BlockKernels<Avx512DotMath>;
  static constexpr GemmKernels kDot{Dot::packed_row_bytes, nullptr,       Dot::linear,
                                    Dot::gate_up,          kBlockMaxRows, kBlockColumnUnit};
  const bool dot = x == Dtype::kBFloat16 && w != Dtype::kFloat32;
  return dot ? kDot : float_kernels<Avx512FloatMath>(x);
}

}  // namespace eprt
