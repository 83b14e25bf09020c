// Vec: a register of fp32 lanes of the instruction set for which the including translation unit is compiled.
//
// Kernels are written once against Vec and compiled once per instruction set. Everything has internal linkage for the
// reason in isa.h. fma is a true fused multiply-add except at the scalar level, whose baseline CPU has none.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "cpu/types.h"

namespace eprt {
namespace {

template <class T>
constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}
inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
// Round to nearest even; a NaN stays a NaN.
inline bf16 to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline void store_scalar(float* p, float x) { *p = x; }
inline void store_scalar(bf16* p, float x) { *p = to_bf16(x); }

#if defined(__AVX512F__)

struct Vec {
  static constexpr int kWidth = 16;
  __m512 v;
};
inline __mmask16 lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline __m512 widen(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }

inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const bf16* p) { return {widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline Vec load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes(n), p)}; }
inline Vec load_n(const bf16* p, int n) { return {widen(_mm256_maskz_loadu_epi16(lanes(n), p))}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(bf16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
}
inline void store_n(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, lanes(n), a.v); }
inline void store_n(bf16* p, Vec a, int n) { _mm256_mask_storeu_epi16(p, lanes(n), (__m256i)_mm512_cvtneps_pbh(a.v)); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec swap_pairs(Vec a) { return {_mm512_permute_ps(a.v, 0xB1)}; }
inline float reduce_add(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline Vec round_even(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec scale_by_power_of_2(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
constexpr float kMinExponent = -160.0f;  // scalef underflows through the denormals to 0

#elif defined(__AVX2__)

struct Vec {
  static constexpr int kWidth = 8;
  __m256 v;
};
inline __m256i lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
inline __m128i narrow(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet_nan, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const bf16* p) { return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline Vec load_n(const float* p, int n) { return {_mm256_maskload_ps(p, lanes(n))}; }
inline Vec load_n(const bf16* p, int n) {
  bf16 padded[8] = {};
  std::memcpy(padded, p, n * sizeof(bf16));
  return load(padded);
}
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(bf16* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a.v)); }
inline void store_n(float* p, Vec a, int n) { _mm256_maskstore_ps(p, lanes(n), a.v); }
inline void store_n(bf16* p, Vec a, int n) {
  bf16 padded[8];
  store(padded, a);
  std::memcpy(p, padded, n * sizeof(bf16));
}
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec swap_pairs(Vec a) { return {_mm256_permute_ps(a.v, 0xB1)}; }
inline float reduce_add(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec round_even(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// n: integers in -127..128. At the ends the factor is 0 and infinity.
constexpr float kMinExponent = -127.0f;
inline Vec scale_by_power_of_2(Vec a, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}

#else

// The baseline of x86-64 through GCC's vector extension: SSE2 code, no FMA.
struct Vec {
  static constexpr int kWidth = 4;
  typedef float Lanes __attribute__((vector_size(16)));
  Lanes v;
};

inline Vec zero() { return {Vec::Lanes{}}; }
inline Vec set1(float x) { return {Vec::Lanes{x, x, x, x}}; }
inline Vec load_n(const float* p, int n) {
  Vec a = zero();
  std::memcpy(&a.v, p, n * sizeof(float));
  return a;
}
inline Vec load(const float* p) { return load_n(p, 4); }
inline Vec load_n(const bf16* p, int n) {
  float x[4] = {};
  for (int i = 0; i < n; ++i) x[i] = to_float(p[i]);
  return load(x);
}
inline Vec load(const bf16* p) { return load_n(p, 4); }
inline void store_n(float* p, Vec a, int n) { std::memcpy(p, &a.v, n * sizeof(float)); }
inline void store(float* p, Vec a) { store_n(p, a, 4); }
inline void store_n(bf16* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = to_bf16(a.v[i]);
}
inline void store(bf16* p, Vec a) { store_n(p, a, 4); }
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec max(Vec a, Vec b) { return {_mm_max_ps(a.v, b.v)}; }
inline Vec swap_pairs(Vec a) { return {Vec::Lanes{a.v[1], a.v[0], a.v[3], a.v[2]}}; }
inline float reduce_add(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float reduce_max(Vec a) { return max_of(max_of(a.v[0], a.v[2]), max_of(a.v[1], a.v[3])); }
inline Vec round_even(Vec a) { return {_mm_cvtepi32_ps(_mm_cvtps_epi32(a.v))}; }
constexpr float kMinExponent = -127.0f;
inline Vec scale_by_power_of_2(Vec a, Vec n) {
  const __m128i exponent = _mm_add_epi32(_mm_cvtps_epi32(n.v), _mm_set1_epi32(127));
  return {_mm_mul_ps(a.v, _mm_castsi128_ps(_mm_slli_epi32(exponent, 23)))};
}

#endif

inline float lane0(Vec a) {
  float lanes[Vec::kWidth];
  store(lanes, a);
  return lanes[0];
}

// 2^x, relative error below 1e-7 for x in -126..127; 0 far below, infinity above 128, exactly 1 at 0; NaN stays NaN
// (max_ps returns its second operand when one is NaN, hence the order). Polynomial: Chebyshev fit of (2^f - 1) / f on
// [-1/2, 1/2].
inline Vec exp2(Vec x) {
  const Vec low = max(set1(kMinExponent), x);
  const Vec bounded = zero() - max(set1(-128.0f), zero() - low);
  const Vec n = round_even(bounded);
  const Vec f = bounded - n;
  Vec p = set1(1.54614478e-4f);
  p = fma(p, f, set1(1.33908668e-3f));
  p = fma(p, f, set1(9.61805694e-3f));
  p = fma(p, f, set1(5.55035695e-2f));
  p = fma(p, f, set1(2.40226507e-1f));
  p = fma(p, f, set1(6.93147182e-1f));
  p = fma(p, f, set1(1.0f));
  return scale_by_power_of_2(p, n);
}

constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -3.4e38f;  // below every score, yet finite: kLowest - kLowest is 0, not NaN

}  // namespace
}  // namespace eprt
