// KV pages as bytes: copied from one cache to another, and their checksum. A cache is [layers, pages, page_bytes].
//
// The checksum detects broken copies (torn, swapped, stale or missing pieces), not manipulation by an adversary. Its
// inner loop is that of XXH3: each 64-bit word is added to its neighbour's sum, and the product of its halves, mixed
// with its place, to its own. So it needs one 32-bit multiplication per word, which all instruction sets have in
// vectors, and runs at the speed of memory. All instruction sets compute the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eprt {

// The checksum of a page in all layers. page: its bytes in the first layer; stride: bytes from one layer to the next.
// Checksums of several parts are chained by passing each as the seed of the next.
uint64_t page_checksum(const char* page, int64_t num_layers, int64_t stride, int64_t page_bytes, uint64_t seed);

struct PageCopyArgs {
  const char* from;           // a cache
  char* to;                   // another one
  const int64_t* from_pages;  // [num_pages]
  const int64_t* to_pages;    // [num_pages]
  int64_t num_pages, num_layers, page_bytes;
  int64_t from_stride, to_stride;  // bytes from one layer to the next
};

void copy_pages(const PageCopyArgs& args);

constexpr int kPageLanes = 8;  // words of a stripe
constexpr int64_t kStripeBytes = kPageLanes * 8;
constexpr uint64_t kPlaceStep = 0x9e3779b185ebca87;  // odd: places of 2^64 stripes differ

// The place of a lane's first word is this, times the lane's number from 1 on.
constexpr uint64_t kFirstPlace = 0xc2b2ae3d27d4eb4f;

// Sums of whole stripes are added to sums [kPageLanes]; a copy writes around the caches.
#define EPRT_PAGE_KERNELS(isa)                                             \
  namespace isa {                                                          \
  void sum_stripes(const char* data, int64_t num_stripes, uint64_t* sums); \
  void copy_around_caches(char* to, const char* from, int64_t num_bytes);  \
  }
EPRT_PAGE_KERNELS(scalar)
EPRT_PAGE_KERNELS(avx2)
#undef EPRT_PAGE_KERNELS

}  // namespace eprt
