// Activations in the layout of B tiles, for gemm_amx.cpp: blocks of up to 16 rows, in which every 32-bit word (two bf16
// or four int8 values of one row) lies beside the same word of the other rows. Zeros fill the last step of K.
//
// int8: each row is quantised with a scale of its own, max / 127. The scales of a block follow its words.
#pragma once

#include <immintrin.h>

#include "cpu/gemm_amx_tiles.h"
#include "cpu/vec.h"

namespace eprt {
namespace {

// Transposes rows of 32-bit elements to columns.
inline void transpose_16x16(__m512i (&v)[16]) {
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

// ---- bf16 -----------------------------------------------------------------------------------------------------------

// Elements that the steps of K hold together. fp8 weights become two steps at a time (widen_fp8x64).
template <bool FP8_ORDER>
constexpr int64_t kBf16Unit = FP8_ORDER ? 64 : 32;

template <bool FP8_ORDER>
int64_t bf16_row_bytes(int64_t k) {
  return round_up(k, kBf16Unit<FP8_ORDER>) * sizeof(bf16);
}

// 32 elements of a row from element `from` on, zeros past k.
inline __m512i load_bf16_row(const char* row, int64_t from, int64_t k) {
  if (from + 32 <= k) return _mm512_loadu_si512(row + from * 2);
  const __mmask32 present = from >= k ? 0 : (1u << (k - from)) - 1;
  return _mm512_maskz_loadu_epi16(present, row + from * 2);
}

// The order in which widen_fp8x64 leaves 64 elements: step `half` holds bytes 8 * half to 8 * half + 7 of each 16.
inline __m512i in_fp8_order(__m512i first, __m512i second, int half) {
  const __m512i even = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), odd = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
  return _mm512_permutex2var_epi64(first, half == 0 ? even : odd, second);
}

// Packs one block of m <= 16 rows.
template <bool FP8_ORDER>
void pack_bf16(const void* x, int64_t x_stride, int64_t m, int64_t k, void* packed, int64_t) {
  const char* in = static_cast<const char*>(x);
  char* out = static_cast<char*>(packed);
  constexpr int64_t kUnit = kBf16Unit<FP8_ORDER>;
  for (int64_t done = 0; done < k; done += kUnit) {
    for (int half = 0; half < kUnit / 32; ++half, out += m * kStepBytes) {
      __m512i v[kTileRows];
      for (int r = 0; r < kTileRows; ++r) {
        const char* row = in + r * x_stride;
        v[r] = _mm512_setzero_si512();
        if (r >= m) continue;
        v[r] = load_bf16_row(row, done, k);
        if constexpr (FP8_ORDER) v[r] = in_fp8_order(v[r], load_bf16_row(row, done + 32, k), half);
      }
      transpose_16x16(v);
      for (int p = 0; p < kTileRows; ++p) _mm512_mask_storeu_epi32(out + p * m * 4, lanes(m), v[p]);
    }
  }
}

// ---- int8 -----------------------------------------------------------------------------------------------------------

constexpr int64_t kInt8Unit = 64;

// Room for the row as bf16 too, which an expert's intermediate is before it is quantised, and for its scale.
inline int64_t int8_row_bytes(int64_t k) { return round_up(k, kInt8Unit) * sizeof(bf16) + 64; }

// Where the scales of a block of m rows are, fp32 [m].
inline const float* int8_scales(const void* block, int64_t m, int64_t k) {
  return reinterpret_cast<const float*>(static_cast<const char*>(block) + m * round_up(k, kInt8Unit));
}
inline void store_int8_scales(void* block, int64_t m, int64_t k, __m512 scale) {
  _mm512_mask_storeu_ps(static_cast<char*>(block) + m * round_up(k, kInt8Unit), lanes(m), scale);
}

// From the largest magnitudes of 16 rows, as bits: of these, NaN is the largest. A NaN makes its row's scale NaN.
inline __m512 int8_scale(__m512i magnitude) {
  const __m512 scale = _mm512_div_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(127.0f));
  return _mm512_max_ps(_mm512_set1_ps(1e-12f), scale);
}

inline __m512i magnitude_of(__m512 v) {
  return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
}

// 16 elements of a bf16 row from element `from` on as fp32, zeros past k.
inline __m512 load_float_row(const char* row, int64_t from, int64_t k) {
  const int64_t left = k - from;
  if (left <= 0) return _mm512_setzero_ps();
  const __mmask16 present = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  return widen(_mm256_maskz_loadu_epi16(present, row + from * 2));
}

// 64 elements of a row, times `inverse`, rounded to int8.
inline __m512i quantize_x64(const char* row, int64_t from, int64_t k, float inverse) {
  const auto part = [&](int i) {
    const __m512 v = _mm512_mul_ps(load_float_row(row, from + 16 * i, k), _mm512_set1_ps(inverse));
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v));
  };
  const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(part(0)), part(1), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(two, part(2), 2), part(3), 3);
}

// Quantises and packs one block of m <= 16 rows.
inline void pack_int8(const void* x, int64_t x_stride, int64_t m, int64_t k, void* packed, int64_t) {
  const char* in = static_cast<const char*>(x);
  char* out = static_cast<char*>(packed);
  alignas(64) int32_t magnitude[kTileRows] = {};
  alignas(64) float inverse[kTileRows];
  for (int r = 0; r < m; ++r) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; i += 16)
      most = _mm512_max_epi32(most, magnitude_of(load_float_row(in + r * x_stride, i, k)));
    magnitude[r] = _mm512_reduce_max_epi32(most);
  }
  const __m512 scale = int8_scale(_mm512_load_si512(magnitude));
  _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1.0f), scale));
  for (int64_t done = 0; done < k; done += kInt8Unit) {
    __m512i v[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      v[r] = r < m ? quantize_x64(in + r * x_stride, done, k, inverse[r]) : _mm512_setzero_si512();
    }
    transpose_16x16(v);
    for (int p = 0; p < kTileRows; ++p) _mm512_mask_storeu_epi32(out + (done / 4 + p) * m * 4, lanes(m), v[p]);
  }
  store_int8_scales(packed, m, k, scale);
}

// Quantises one block of rows in place: from packed bf16, zeros up to whole units of K, to packed int8.
inline void requantize(void* block, int64_t m, int64_t k) {
  char* data = static_cast<char*>(block);
  const __mmask16 present = lanes(static_cast<int>(m));
  const auto pair = [&](int64_t i) { return _mm512_maskz_loadu_epi32(present, data + i * m * 4); };
  const auto low = [](__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); };
  const auto high = [](__m512i v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(-65536))); };
  const int64_t end = round_up(k, kInt8Unit);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < end / 2; ++i) {
    const __m512i v = pair(i);
    most = _mm512_max_epi32(most, _mm512_max_epi32(magnitude_of(low(v)), magnitude_of(high(v))));
  }
  const __m512 scale = int8_scale(most), inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), scale);
  const auto byte = [&](__m512 v, int shift) {
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(v, inverse));
    return _mm512_slli_epi32(_mm512_and_si512(rounded, _mm512_set1_epi32(0xff)), shift);
  };
  for (int64_t i = 0; i < end / 4; ++i) {  // the word that is written lies before those that are still to be read
    const __m512i first = pair(2 * i), second = pair(2 * i + 1);
    const __m512i half = _mm512_or_si512(byte(low(first), 0), byte(high(first), 8));
    const __m512i rest = _mm512_or_si512(byte(low(second), 16), byte(high(second), 24));
    _mm512_mask_storeu_epi32(data + i * m * 4, present, _mm512_or_si512(half, rest));
  }
  store_int8_scales(block, m, k, scale);
}

}  // namespace
}  // namespace eprt
