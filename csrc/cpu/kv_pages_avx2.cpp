// Copies and sums of KV pages (kv_pages.h): the suffix of the file name chooses the compiler's flags.
#include <immintrin.h>

#include <cstring>

#include "cpu/kv_pages.h"

namespace eprt::avx2 {
namespace {

constexpr int kWords = 4;  // of a vector
constexpr int kVectors = kPageLanes / kWords;

}  // namespace

void sum_stripes(const char* data, int64_t num_stripes, uint64_t* sums) {
  __m256i sum[kVectors], place[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    sum[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums) + v);
    uint64_t first[kWords];
    for (int i = 0; i < kWords; ++i) first[i] = kFirstPlace * (v * kWords + i + 1);
    place[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
  }
  const __m256i step = _mm256_set1_epi64x(static_cast<int64_t>(kPlaceStep));
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe, data += kStripeBytes) {
    for (int v = 0; v < kVectors; ++v) {
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data) + v);
      const __m256i mixed = _mm256_xor_si256(word, place[v]);
      const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
      const __m256i neighbour = _mm256_shuffle_epi32(word, 0x4e);  // the two words of each half, swapped
      sum[v] = _mm256_add_epi64(sum[v], _mm256_add_epi64(neighbour, product));
      place[v] = _mm256_add_epi64(place[v], step);
    }
  }
  for (int v = 0; v < kVectors; ++v) _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums) + v, sum[v]);
}

void copy_around_caches(char* to, const char* from, int64_t num_bytes) {
  const int64_t misaligned = -reinterpret_cast<int64_t>(to) & (sizeof(__m256i) - 1);
  int64_t at = misaligned < num_bytes ? misaligned : num_bytes;
  std::memcpy(to, from, at);
  for (; at + kStripeBytes <= num_bytes; at += kStripeBytes) {
    for (int v = 0; v < kVectors; ++v) {
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at) + v);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at) + v, word);
    }
  }
  std::memcpy(to + at, from + at, num_bytes - at);
  _mm_sfence();  // other threads see the bytes before what is written next
}

}  // namespace eprt::avx2
