#include "cpu/kv_pages.h"

#include <cstring>

#include "cpu/isa.h"

namespace eprt {
namespace {

// Odd: each step is a bijection of the state, so that no difference is lost.
constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15;

uint64_t mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * kMultiplier;
  return state ^ (state >> 32);
}

uint64_t piece_checksum(const char* data, int64_t num_bytes, uint64_t seed) {
  const int64_t num_stripes = num_bytes / kStripeBytes, rest = num_bytes % kStripeBytes;
  const auto sum = cpu_isa() >= Isa::kAvx2 ? avx2::sum_stripes : scalar::sum_stripes;
  uint64_t sums[kPageLanes] = {}, tail[kPageLanes] = {};
  sum(data, num_stripes, sums);
  std::memcpy(tail, data + num_bytes - rest, rest);
  uint64_t state = mix(seed, num_bytes);
  for (int i = 0; i < kPageLanes; ++i) state = mix(mix(state, sums[i]), tail[i]);
  return state;
}

}  // namespace

uint64_t page_checksum(const char* page, int64_t num_layers, int64_t stride, int64_t page_bytes, uint64_t seed) {
  for (int64_t layer = 0; layer < num_layers; ++layer) seed = piece_checksum(page + layer * stride, page_bytes, seed);
  return seed;
}

void copy_pages(const PageCopyArgs& args) {
  const auto copy = cpu_isa() >= Isa::kAvx2 ? avx2::copy_around_caches : scalar::copy_around_caches;
  for (int64_t i = 0; i < args.num_pages; ++i) {
    const char* from = args.from + args.from_pages[i] * args.page_bytes;
    char* to = args.to + args.to_pages[i] * args.page_bytes;
    for (int64_t layer = 0; layer < args.num_layers; ++layer) {
      copy(to + layer * args.to_stride, from + layer * args.from_stride, args.page_bytes);
    }
  }
}

}  // namespace eprt
