// DeepSeek V4's attention: one vector is key and value at once, for all heads. A query sees some consecutive tokens,
// and compressed entries in pages; a sink takes part in its softmax and gives nothing. And the pooling that makes an
// entry of several tokens. Rows are computed one by one, their keys in order: neither batch nor chunk changes a bit.
#pragma once

#include <cstdint>

#include "cpu/entry_fp8.h"
#include "cpu/types.h"

namespace eprt {

// Everything but `entries` is contiguous. Where entry_type is fp8, tokens are stored as entries are, and both have
// entry_size() bytes.
struct SharedAttentionArgs {
  const void* query;           // [rows, heads, size]
  const void* local;           // [num_local, entry_size]: tokens
  Dtype type;                  // of query, and of local unless that is fp8
  const int64_t* local_begin;  // [rows], the first token that a row sees
  const int64_t* local_end;    // [rows], behind the last
  const void* entries;         // [num_pages, page_entries, entry_size]
  Dtype entry_type;
  int64_t entry_size, rope;                     // elements of an entry; with fp8, how many of `size` are rotated
  int64_t entry_page, num_pages, page_entries;  // stride of a page, in elements
  const int64_t* table;                         // [requests, table_width]
  int64_t num_requests, table_width;
  const int32_t* request;      // [rows]
  const int32_t* num_entries;  // [rows]: the first of the request's, or of the row's slots
  const int32_t* slot;         // [rows, slot_width]: page * page_entries + offset, or null
  int64_t slot_width;
  const float* sink;  // [heads]
  float* out;         // [rows, heads, size]
  int64_t rows, heads, size, num_local;
  float scale;
  int num_threads;

  int64_t place(int64_t row, int64_t entry) const {  // in elements
    if (slot != nullptr) {
      const int64_t at = slot[row * slot_width + entry];
      return at / page_entries * entry_page + at % page_entries * entry_size;
    }
    return table[request[row] * table_width + entry / page_entries] * entry_page + entry % page_entries * entry_size;
  }
};

struct PoolArgs {
  const float* state;    // [num_states, 2, channels]: values, then gates
  const int64_t* index;  // [rows, slots]; -1 for none
  float* out;            // [rows, size]
  int64_t num_states, channels, rows, slots, size;
  int64_t first_slots;  // so many slots give their first `size` channels, the others their last
  int num_threads;
};

// The first row that reaches outside a tensor, or -1. The kernels rely on these checks.
int64_t shared_attention_first_bad_row(const SharedAttentionArgs& args);
int64_t pool_first_bad_row(const PoolArgs& args);

void shared_attention(const SharedAttentionArgs& args);
void pool_entries(const PoolArgs& args);

#define EPRT_SHARED_ATTENTION_KERNELS(isa)                \
  namespace isa {                                         \
  void shared_attention(const SharedAttentionArgs& args); \
  void pool_entries(const PoolArgs& args);                \
  }
EPRT_SHARED_ATTENTION_KERNELS(scalar)
EPRT_SHARED_ATTENTION_KERNELS(avx2)
EPRT_SHARED_ATTENTION_KERNELS(avx512)
#undef EPRT_SHARED_ATTENTION_KERNELS

}  // namespace eprt
