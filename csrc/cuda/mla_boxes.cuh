// Where a segment's blocks of 64 positions lie in a paged cache.
#pragma once
#include "mla_work.cuh"

namespace eprt {

// The rows of the cache in which the boxes of a segment's blocks begin. The lanes of a warp know 32 boxes, and the 32
// after those, so a page is known long before it is needed. kPerBlock: boxes, one below the other.
template <int kPerBlock, class Params>
struct Boxes {
  const Params& p;
  const int32_t* pages;  // of the request
  int length, begin, window = 0;
  int row, next_row;  // of box 32 window + lane, and of the one 32 later

  EPRT_DEVICE Boxes(const Params& p, const Segment& s)
      : p(p), pages(p.page_table + int64_t(s.index) * p.table_width), length(s.request.length), begin(s.begin) {
    row = find(threadIdx.x % kWarp), next_row = find(kWarp + threadIdx.x % kWarp);
  }

  // One behind the cache, from where zeros are loaded, for a box behind the context.
  EPRT_DEVICE int find(int box) const {
    const int position = begin * kKeys + box * (kKeys / kPerBlock);
    if (position >= length) return p.cache_rows;
    return __ldg(pages + position / p.page_size) * p.page_size + position % p.page_size;
  }

  // Called by all lanes. box: not in front of the window, at most 32 behind it.
  EPRT_DEVICE int row_of(int box) {
    return __shfl_sync(kAllLanes, box / kWarp == window ? row : next_row, box % kWarp);
  }

  // Called by all lanes: no box in front of this one is asked for any more.
  EPRT_DEVICE void pass(int box) {
    if (box / kWarp == window) return;
    window = box / kWarp, row = next_row, next_row = find((window + 1) * kWarp + threadIdx.x % kWarp);
  }
};

}  // namespace eprt
