// Multi-head latent attention over a paged cache: arguments and entry points of the two kernels.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace eprt {

// Strides are in elements; the last dimension of every tensor is contiguous.
struct MlaArgs {
  const void* q_nope;  // [T, N, nope]
  int64_t q_nope_row, q_nope_head;
  const void* q_rope;  // [T, N, rope]
  int64_t q_rope_row, q_rope_head;
  Dtype q_type;
  const void* kv;  // [num_pages, page_size, lora + rope]; fp8: bytes, see widen_fp8 in mla_pack.h
  int64_t kv_page, kv_row, num_pages, page_size;
  Dtype kv_type;
  const int32_t* page_table;  // [B, P]
  int64_t page_table_row, page_table_width;
  const int32_t* seq_len;      // [B]
  const int32_t* query_start;  // [B + 1]; null in decode, where request b has row b only
  const void* w_kv_b;          // [N * (nope + value), lora], contiguous
  Dtype w_type;
  void* out;  // [T, N, value] of q_type, contiguous
  int64_t num_requests, num_rows, num_heads, nope, rope, lora, value;
  float softmax_scale;
  int num_threads;

  int64_t first_row(int64_t b) const { return query_start ? query_start[b] : b; }
  int64_t end_row(int64_t b) const { return query_start ? query_start[b + 1] : b + 1; }
  int64_t kv_dim() const { return lora + rope; }
  int64_t kv_value_bytes() const { return kv_type == Dtype::kFloat32 ? 4 : kv_type == Dtype::kBFloat16 ? 2 : 1; }
  int64_t kv_entry_bytes() const {
    return kv_type == Dtype::kFp8E4M3 ? lora + 2 * rope + 4 : kv_dim() * kv_value_bytes();
  }
  const void* kv_at(int64_t b, int64_t position) const {
    const int64_t page = page_table[b * page_table_row + position / page_size];
    const int64_t index = page * kv_page + position % page_size * kv_row;
    return static_cast<const char*>(kv) + index * kv_value_bytes();
  }
};

// The first request whose lengths, rows or pages lie outside the tensors, or -1. Both kernels rely on this check.
int64_t mla_first_bad_request(const MlaArgs& args);

void mla_decode(const MlaArgs& args);
void mla_extend(const MlaArgs& args);

namespace scalar {
void mla_decode(const MlaArgs& args);
void mla_extend(const MlaArgs& args);
}  // namespace scalar
namespace avx2 {
void mla_decode(const MlaArgs& args);
void mla_extend(const MlaArgs& args);
}  // namespace avx2
namespace avx512 {
void mla_decode(const MlaArgs& args);
void mla_extend(const MlaArgs& args);
}  // namespace avx512
namespace amx {
void mla_decode(const MlaArgs& args);
void mla_extend(const MlaArgs& args);
}  // namespace amx

}  // namespace eprt
