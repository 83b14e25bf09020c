// AVX-512: fp32 arithmetic for float32 activations or weights, bf16 dot products otherwise.
//
// vdpbf16ps multiplies exactly and adds in fp32, rounding to nearest even like an FMA but reading and writing
// subnormals as zero. int8 and e4m3 weights are exact in bf16; their scales multiply fp32 sums.
#include <immintrin.h>

#include "cpu/gemm_block.h"

namespace eprt {
namespace {

__m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
__m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

struct Avx512Sums {
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }

  static __m512 reduce_4(const Sum* s) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(s[0], s[1]), _mm512_unpackhi_ps(s[0], s[1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(s[2], s[3]), _mm512_unpackhi_ps(s[2], s[3]));
    const __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
  }
  // Sixteen vectors to one of their sums: each 128-bit lane holds four partial sums after reduce_4; then add lanes.
  template <int N>
  static void reduce(const Sum* sums, float* out) {
#pragma GCC unroll 4
    for (int i = 0; i < N; i += 16) {
      __m512 v[4];
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        Sum s[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) s[j] = i + 4 * q + j < N ? sums[i + 4 * q + j] : zero();
        v[q] = i + 4 * q < N ? reduce_4(s) : zero();
      }
      const __m512 v01 = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
      const __m512 v23 = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x88), _mm512_shuffle_f32x4(v[2], v[3], 0xdd));
      _mm512_storeu_ps(out + i,
                       _mm512_add_ps(_mm512_shuffle_f32x4(v01, v23, 0x88), _mm512_shuffle_f32x4(v01, v23, 0xdd)));
    }
  }
};

struct Avx512FloatMath : Avx512Sums {
  using X = float;
  using Operand = __m512;
  static constexpr int kStep = 16, kMaxRows = 4, kTile = 24;
  static constexpr bool kFoldsScale = true;

  static Operand load(const float* p) { return _mm512_loadu_ps(p); }
  static Operand load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(p))); }
  static Operand load(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_256(p)), 16));
  }
  // By way of fp16, as in gemm_avx2.cpp.
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
  static constexpr int kStep = 32, kMaxRows = 4, kTile = 24;
  static constexpr bool kFoldsScale = false;

  static Operand load(const bf16* p) { return _mm512_loadu_si512(p); }
  static Operand load(const int8_t* p) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(p)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_128(p + 16)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
  }
  // Exponent and mantissa move into place and the exponent is rebiased from 7 to 127. Subnormals (magnitude 0..7) and
  // NaN (magnitude 127) come from a table instead; vpermw looks at the five low bits, which tell all of these apart.
  static Operand load(const fp8* p) {
    const __m512i wide = _mm512_cvtepi8_epi16(load_256(p));
    const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x07f0));
    const __m512i above = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(0x80));
    const __mmask32 special = _mm512_cmpge_epu16_mask(above, _mm512_set1_epi16(0x7f0 - 0x80));
    const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7));
    const __m512i table =
        _mm512_zextsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));  // i * 2^-9
    const __m512i with_nan = _mm512_mask_set1_epi16(table, 1u << 31, 0x7fc0);
    const __m512i value = _mm512_mask_permutexvar_epi16(normal, special, wide, with_nan);
    constexpr int kValueOrSign = 0xf8;  // a | (b & c)
    return _mm512_ternarylogic_epi32(value, wide, _mm512_set1_epi16(static_cast<short>(0x8000)), kValueOrSign);
  }
  static void store(bf16* p, Operand v) { _mm512_storeu_si512(p, v); }

  static Sum mul_add(Operand x, Operand w, Sum sum) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
  static Sum add_scaled(Sum total, Sum sum, float scale) { return _mm512_fmadd_ps(sum, _mm512_set1_ps(scale), total); }
};

}  // namespace

const GemmKernels& gemm_kernels_avx512(Dtype x, Dtype w) {
  using Dot = BlockKernels<Avx512DotMath>;
  static constexpr GemmKernels kDot{Dot::packed_row_bytes, nullptr, Dot::linear, Dot::gate_up, kBlockMaxRows};
  const bool dot = x == Dtype::kBFloat16 && w != Dtype::kFloat32;
  return dot ? kDot : float_kernels<Avx512FloatMath>(x);
}

}  // namespace eprt
