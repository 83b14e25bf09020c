// AVX2 + FMA + F16C: fp32 arithmetic, weights widened in registers.
#include <immintrin.h>

#include "cpu/gemm_block.h"

namespace eprt {
namespace {

struct Avx2Math {
  using X = float;
  using Operand = __m256;
  using Sum = __m256;
  static constexpr int kStep = 8;
  static constexpr int kDirectRows = 8;
  static constexpr bool kFoldsScale = true;
  template <class W>
  static constexpr bool kPairs = std::is_same_v<W, fp8>;
  static constexpr TileShape kTile{4, 3}, kScaledTile = kTile;
  static constexpr int direct_columns(int rows, bool) {
    constexpr int kColumns[] = {0, 4, 6, 4, 3};
    return rows <= 4 ? kColumns[rows] : 0;
  }

  static Operand load(const float* p) { return _mm256_loadu_ps(p); }
  static Operand load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static Operand load(const bf16* p) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  // e4m3 shifted into place is the fp16 of 2^-8 times the value, subnormals included, and F16C reads fp16 subnormals
  // exactly in any denormal mode. Only NaN is a special case: as fp16 it would be read as 480.
  static Operand load_scaled(const fp8* p, float scale) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbf80)));
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7f));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, nan)), _mm256_set1_ps(scale * 0x1p8f));
  }
  static void load_pair(const fp8* p, const float* scale, Operand& first, Operand& second) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
    const __m256i value = _mm256_or_si256(half, nan);
    const __m256 factor = _mm256_set1_ps(*scale * 0x1p8f);
    first = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(value)), factor);
    second = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(value, 1)), factor);
  }
  static void store(float* p, Operand v) { _mm256_storeu_ps(p, v); }

  static Sum zero() { return _mm256_setzero_ps(); }
  static Sum mul_add(Operand x, Operand w, Sum sum) { return _mm256_fmadd_ps(x, w, sum); }

  // The lane sums of a b c d.
  static __m128 reduce_4(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256d ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
    const __m256d cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
    const __m256 halves =
        _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  }

  template <int ROWS, int COLS>
  static void add_reduced(const Sum* sums, float* out, int64_t ld) {
    float reduced[(ROWS * COLS + 3) / 4 * 4];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS * COLS; i += 4) {
      const auto at = [&](int j) { return i + j < ROWS * COLS ? sums[i + j] : zero(); };
      _mm_storeu_ps(reduced + i, reduce_4(at(0), at(1), at(2), at(3)));
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < COLS; ++c) out[r * ld + c] += reduced[r * COLS + c];
    }
  }
};

}  // namespace

const GemmKernels& gemm_kernels_avx2(Dtype x, Dtype) { return float_kernels<Avx2Math>(x); }

}  // namespace eprt
