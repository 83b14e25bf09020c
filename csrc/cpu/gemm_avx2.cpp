// AVX2 + FMA + F16C: fp32 arithmetic, weights widened in registers.
#include <immintrin.h>

#include "cpu/gemm_block.h"

namespace eprt {
namespace {

struct Avx2Math {
  using X = float;
  using Operand = __m256;
  using Sum = __m256;
  static constexpr int kStep = 8, kMaxRows = 3, kTile = 12;
  static constexpr bool kFoldsScale = true;

  static Operand load(const float* p) { return _mm256_loadu_ps(p); }
  static Operand load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static Operand load(const bf16* p) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  // e4m3 shifted into place is the fp16 of 2^-8 times the value, subnormals included, and F16C reads fp16 subnormals
  // exactly whatever the denormal mode. Only NaN needs a look: as fp16 it would read 480.
  static Operand load_scaled(const fp8* p, float scale) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbf80)));
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7f));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, nan)), _mm256_set1_ps(scale * 0x1p8f));
  }
  static void store(float* p, Operand v) { _mm256_storeu_ps(p, v); }

  static Sum zero() { return _mm256_setzero_ps(); }
  static Sum mul_add(Operand x, Operand w, Sum sum) { return _mm256_fmadd_ps(x, w, sum); }

  // Four vectors a b c d to [a b c d], halves of the vectors still apart.
  static __m256 reduce_4(const Sum* s) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(s[0], s[1]), _mm256_unpackhi_ps(s[0], s[1]));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(s[2], s[3]), _mm256_unpackhi_ps(s[2], s[3]));
    const __m256d ab2 = _mm256_castps_pd(ab), cd2 = _mm256_castps_pd(cd);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab2, cd2)),
                         _mm256_castpd_ps(_mm256_unpackhi_pd(ab2, cd2)));
  }
  template <int N>
  static void reduce(const Sum* sums, float* out) {
#pragma GCC unroll 8
    for (int i = 0; i < N; i += 4) {
      Sum s[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) s[j] = i + j < N ? sums[i + j] : zero();
      const __m256 r = reduce_4(s);
      _mm_storeu_ps(out + i, _mm_add_ps(_mm256_castps256_ps128(r), _mm256_extractf128_ps(r, 1)));
    }
  }
};

}  // namespace

const GemmKernels& gemm_kernels_avx2(Dtype x, Dtype) { return float_kernels<Avx2Math>(x); }

}  // namespace eprt
