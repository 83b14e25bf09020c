// Copies and sums of KV pages (kv_pages.h): the suffix of the file name chooses the compiler's flags.
#include <cstring>

#include "cpu/kv_pages.h"

namespace eprt::scalar {

void sum_stripes(const char* data, int64_t num_stripes, uint64_t* sums) {
  uint64_t place[kPageLanes];
  for (int i = 0; i < kPageLanes; ++i) place[i] = kFirstPlace * (i + 1);
  for (int64_t stripe = 0; stripe < num_stripes; ++stripe, data += kStripeBytes) {
    uint64_t word[kPageLanes];
    std::memcpy(word, data, sizeof word);
    for (int i = 0; i < kPageLanes; ++i) {
      const uint64_t mixed = word[i] ^ place[i];
      sums[i] += word[i ^ 1] + (mixed & 0xffffffff) * (mixed >> 32);
      place[i] += kPlaceStep;
    }
  }
}

void copy_around_caches(char* to, const char* from, int64_t num_bytes) { std::memcpy(to, from, num_bytes); }

}  // namespace eprt::scalar
