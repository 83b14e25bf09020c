// The indexer of DeepSeek-V3.2's sparse attention: which cached tokens each query attends to.
//
//   score[t, i] = sum_h weight[t, h] * max(0, query[t, h] . key[i])        for i < length[t]
//
// and the top_k best scores, lower positions first among equal ones, as slots of the cache in order of position.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace eprt {

// Strides are in elements; the last dimension of every tensor is contiguous.
struct IndexArgs {
  const void* query;  // [T, heads, size]
  int64_t query_row, query_head;
  Dtype query_type;
  const float* weight;  // [T, heads], contiguous
  // [num_pages, page_size, size]; fp8: bytes, `size` values in e4m3, then an fp32 scale; fp4: two values to a byte, the
  // even one in the low half, then the scale of each 32 as the exponent of a power of 2
  const void* keys;
  int64_t key_page, key_row, num_pages, page_size;
  Dtype key_type;
  const int32_t* page_table;  // [B, P]
  int64_t page_table_row, page_table_width;
  const int32_t* request;  // [T], rows of the page table; equal ones lie together
  const int32_t* length;   // [T], tokens that the query sees
  int32_t* slot;           // [T, top_k]; -1 behind the last token where a query sees fewer
  int64_t num_rows, num_requests, heads, size, top_k;
  int num_threads;

  int64_t key_value_bytes() const { return key_type == Dtype::kFloat32 ? 4 : key_type == Dtype::kBFloat16 ? 2 : 1; }
  int32_t slot_at(int64_t row, int64_t position) const {
    const int64_t page = page_table[request[row] * page_table_row + position / page_size];
    return static_cast<int32_t>(page * page_size + position % page_size);
  }
  const void* key_at(int64_t row, int64_t position) const {
    const int64_t page = page_table[request[row] * page_table_row + position / page_size];
    const int64_t index = page * key_page + position % page_size * key_row;
    return static_cast<const char*>(keys) + index * key_value_bytes();
  }
};

// The first row whose request, length or pages lie outside the tensors, or -1. The kernel relies on this check.
int64_t index_first_bad_row(const IndexArgs& args);

void index_topk(const IndexArgs& args);

#define EPRT_INDEX_KERNEL(isa)            \
  namespace isa {                         \
  void index_topk(const IndexArgs& args); \
  }
EPRT_INDEX_KERNEL(scalar)
EPRT_INDEX_KERNEL(avx2)
EPRT_INDEX_KERNEL(avx512)
EPRT_INDEX_KERNEL(amx)
#undef EPRT_INDEX_KERNEL

}  // namespace eprt
