// fp4 weights (fp4.h): a table of 16 bytes is one shuffle.
#include <immintrin.h>

#include "cpu/fp4.h"

namespace eprt::avx2 {

void fp4_to_bf16(const Fp4Codes* of_scale, const uint8_t* data, const uint8_t* scale, int64_t blocks, bf16* out) {
  const __m128i low_half = _mm_set1_epi8(15);
  for (int64_t b = 0; b < blocks; ++b) {
    const Fp4Codes& codes = of_scale[scale[b]];
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.low));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.high));
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + b * kFp4Block / 2));
    const __m128i even = _mm_and_si128(bytes, low_half), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low_half);
    auto* to = reinterpret_cast<__m128i*>(out + b * kFp4Block);
    const __m128i code_of[] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
    for (const __m128i code : code_of) {
      const __m128i lows = _mm_shuffle_epi8(low, code), highs = _mm_shuffle_epi8(high, code);
      _mm_storeu_si128(to++, _mm_unpacklo_epi8(lows, highs));
      _mm_storeu_si128(to++, _mm_unpackhi_epi8(lows, highs));
    }
  }
}

}  // namespace eprt::avx2
