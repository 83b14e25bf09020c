// Conversion of weights of any stored type to bfloat16 in AVX-512 registers. For gemm_avx512.cpp, gemm_amx.cpp.
#pragma once

#include <immintrin.h>

#include "cpu/types.h"

namespace eprt {
namespace {

inline __m512i load_bf16x32(const bf16* p) { return _mm512_loadu_si512(p); }

inline __m512i load_bf16x32(const int8_t* p) {
  const __m128i* at = reinterpret_cast<const __m128i*>(p);
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// e4m3 values, sign-extended to 16 bits, times 2^SHIFT. Exponent and mantissa are shifted into place and the exponent
// bias changes from 7 to 127. Subnormals (magnitude 0 to 7) and NaN (magnitude 127) come from a table; vpermw uses the
// five low bits, which differ for all of these.
template <int SHIFT = 0>
inline __m512i bf16_of_e4m3(__m512i wide) {
  const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x07f0));
  const __m512i above_subnormal = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(8 << 4));
  const __mmask32 special = _mm512_cmpge_epu16_mask(above_subnormal, _mm512_set1_epi16((127 - 8) << 4));
  const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16((127 - 7 + SHIFT) << 7));
  constexpr short kStep = SHIFT * (1 << 7);  // i * 2^(SHIFT - 9)
  const __m512i subnormal =
      _mm512_zextsi128_si512(_mm_setr_epi16(0, 0x3b00 + kStep, 0x3b80 + kStep, 0x3bc0 + kStep, 0x3c00 + kStep,
                                            0x3c20 + kStep, 0x3c40 + kStep, 0x3c60 + kStep));
  const __m512i table = _mm512_mask_set1_epi16(subnormal, 1u << 31, 0x7fc0);
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, special, wide, table);
  constexpr int kValueOrSign = 0xf8;  // a | (b & c)
  return _mm512_ternarylogic_epi32(value, wide, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), kValueOrSign);
}

inline __m512i load_bf16x32(const fp8* p) {
  return bf16_of_e4m3(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}

// 64 e4m3 values times 2^-kFp8Shift: in `first` bytes 0 to 7 of each 16, in `second` bytes 8 to 15. With this shift the
// bias of the exponent is 112, whose bits no e4m3 exponent has: both bytes of a result are bits of the source moved and
// joined. Vectors with a subnormal, a zero or a NaN are rare, and take the exact way.
constexpr int kFp8Shift = 8;

inline void widen_fp8x64(__m512i codes, __m512i& first, __m512i& second) {
  const __m512i above_subnormal = _mm512_sub_epi8(_mm512_and_si512(codes, _mm512_set1_epi8(0x7f)), _mm512_set1_epi8(8));
  if (_mm512_cmpge_epu8_mask(above_subnormal, _mm512_set1_epi8(127 - 8)) != 0) [[unlikely]] {
    const __m512i none = _mm512_setzero_si512();
    first = bf16_of_e4m3<-kFp8Shift>(_mm512_srai_epi16(_mm512_unpacklo_epi8(none, codes), 8));
    second = bf16_of_e4m3<-kFp8Shift>(_mm512_srai_epi16(_mm512_unpackhi_epi8(none, codes), 8));
    return;
  }
  const __m512i low = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi8(static_cast<char>(0xf0)));
  constexpr int kSelect = 0xca, kAndOr = 0xea;  // a ? b : c; (a & b) | c
  const __m512i exponent =
      _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x07), _mm512_srli_epi16(codes, 4), codes, kSelect);
  const __m512i high =
      _mm512_ternarylogic_epi32(exponent, _mm512_set1_epi8(static_cast<char>(0x87)), _mm512_set1_epi8(0x38), kAndOr);
  first = _mm512_unpacklo_epi8(low, high);
  second = _mm512_unpackhi_epi8(low, high);
}

}  // namespace
}  // namespace eprt
