// Exact conversion of 32 weights of any stored type to bfloat16 in an AVX-512 register. For gemm_avx512.cpp,
// gemm_amx.cpp.
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

// Exponent and mantissa are shifted into place and the exponent bias changes from 7 to 127. Subnormals (magnitude 0 to
// 7) and NaN (magnitude 127) come from a table; vpermw uses the five low bits, which differ for all of these.
inline __m512i load_bf16x32(const fp8* p) {
  const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i magnitude = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x07f0));
  const __m512i above_subnormal = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(8 << 4));
  const __mmask32 special = _mm512_cmpge_epu16_mask(above_subnormal, _mm512_set1_epi16((127 - 8) << 4));
  const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16((127 - 7) << 7));
  const __m512i subnormal =
      _mm512_zextsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));  // i * 2^-9
  const __m512i table = _mm512_mask_set1_epi16(subnormal, 1u << 31, 0x7fc0);
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, special, wide, table);
  constexpr int kValueOrSign = 0xf8;  // a | (b & c)
  return _mm512_ternarylogic_epi32(value, wide, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), kValueOrSign);
}

}  // namespace
}  // namespace eprt
