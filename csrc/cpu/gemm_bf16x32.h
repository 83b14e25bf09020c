// Conversion of weights of any stored type to bfloat16 in AVX-512 registers. For gemm_avx512.cpp, gemm_amx.cpp.
#pragma once

#include <immintrin.h>

#include <bit>

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

// ---- 64 values by table ---------------------------------------------------------------------------------------------

// The bf16 of 128 values, their low bytes and their high bytes apart: what vpermi2b looks up.
struct alignas(64) Bf16Table {
  uint8_t low[128], high[128];
};

template <class Value>
constexpr Bf16Table bf16_table(Value&& value) {
  Bf16Table table{};
  for (int i = 0; i < 128; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(value(i));
    table.low[i] = static_cast<uint8_t>(bits >> 16);
    table.high[i] = static_cast<uint8_t>(bits >> 24);
  }
  return table;
}

constexpr float magnitude_of_e4m3(int code) {
  if (code == 127) return std::bit_cast<float>(0x7fc00000u);
  if (code < 8) return static_cast<float>(code) * 0x1p-9f;
  return std::bit_cast<float>(static_cast<uint32_t>((code << 20) + ((127 - 7) << 23)));
}

constexpr Bf16Table kE4m3Magnitude = bf16_table(magnitude_of_e4m3);
constexpr Bf16Table kInteger = bf16_table([](int i) { return static_cast<float>(i); });

inline __m512i look_up(const uint8_t (&bytes)[128], __m512i index) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), index, _mm512_load_si512(bytes + 64));
}

// a with the sign bits of b.
inline __m512i with_sign(__m512i a, __m512i b) {
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi8(static_cast<char>(0x80)), kOrAnd);
}

// Values of 64 bytes in an order that unpacklo and unpackhi turn into the first 32 and the last 32.
inline __m512i load_for_unpack(const void* p) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_loadu_si512(p));
}

inline void load_bf16x64(const fp8* p, __m512i& first, __m512i& second) {
  const __m512i codes = load_for_unpack(p);
  const __m512i low = look_up(kE4m3Magnitude.low, codes);
  const __m512i high = with_sign(look_up(kE4m3Magnitude.high, codes), codes);
  first = _mm512_unpacklo_epi8(low, high);
  second = _mm512_unpackhi_epi8(low, high);
}

// The magnitude 128 is not in the table: vpermi2b takes it for 0, whose low byte it has.
inline void load_bf16x64(const int8_t* p, __m512i& first, __m512i& second) {
  const __m512i codes = load_for_unpack(p), least = _mm512_set1_epi8(-128), magnitude = _mm512_abs_epi8(codes);
  const __m512i low = look_up(kInteger.low, magnitude);
  const __m512i high =
      _mm512_mask_mov_epi8(with_sign(look_up(kInteger.high, magnitude), codes), _mm512_cmpeq_epi8_mask(codes, least),
                           _mm512_set1_epi8(static_cast<char>(0xc3)));
  first = _mm512_unpacklo_epi8(low, high);
  second = _mm512_unpackhi_epi8(low, high);
}

// ---- 64 e4m3 values by moving their bits ----------------------------------------------------------------------------

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
  // Rows of a matrix of bits, the first byte for the highest bit of a result: low = code << 4; high = the sign, 0111,
  // and the three upper bits of the exponent.
  const __m512i to_low = _mm512_set1_epi64(0x0000000001020408), to_high = _mm512_set1_epi64(0x1020400000000080);
  const __m512i low = _mm512_gf2p8affine_epi64_epi8(codes, to_low, 0);
  const __m512i high = _mm512_gf2p8affine_epi64_epi8(codes, to_high, 0x38);
  first = _mm512_unpacklo_epi8(low, high);
  second = _mm512_unpackhi_epi8(low, high);
}

}  // namespace
}  // namespace eprt
