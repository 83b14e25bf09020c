// Entry points of the row-wise operators: RMSNorm, SiLU-and-multiply, rotary embedding, cache insertion.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace eprt {

// Strides are in elements. The last dimension of every tensor is contiguous; outputs are contiguous.

struct RmsNormArgs {
  const void* x;  // [rows, size]
  int64_t x_row;
  const void* residual;  // [rows, size] or null: added to x before the norm
  int64_t residual_row;
  const void* weight;  // [size]
  Dtype weight_type;
  void* sum;  // [rows, size]: x + residual; null without a residual
  void* out;  // [rows, size]
  Dtype type;
  int64_t rows, size;
  float eps;
  int num_threads;
};

struct SiluMulArgs {
  const void* x;  // [rows, 2 * size]: gate, then up
  int64_t x_row;
  void* out;  // [rows, size]
  Dtype type;
  int64_t rows, size;
  float limit;  // gates are at most this, ups within plus and minus this; infinity for none
  int num_threads;
};

struct RopeArgs {
  const void* x;  // [rows, heads, size], size even
  int64_t x_row, x_head;
  const float* cos_sin;     // [num_positions, size]: size / 2 cosines, then size / 2 sines
  const int64_t* position;  // [rows]
  void* out;                // [rows, heads, size]
  Dtype type;
  int64_t rows, heads, size, num_positions;
  bool interleaved;  // pairs (2i, 2i + 1), otherwise (i, i + size / 2)
  int num_threads;
};

struct CacheInsertArgs {
  void* pages;  // [num_pages, page_size, size]
  int64_t page_stride, row_stride, num_pages, page_size;
  Dtype page_type;
  const int64_t* slot;  // [rows]
  const void* kv;       // [rows, size]
  int64_t kv_row;
  Dtype kv_type;
  int64_t rows, size;
  int num_threads;
};

// Cache entries from projections [latent | key]: the latent normalised, the key rotated.
struct LatentInsertArgs {
  CacheInsertArgs entry;  // of the projections
  int64_t latent_size;
  const void* weight;  // [latent_size]
  Dtype weight_type;
  float eps;
  const float* cos_sin;     // [num_positions, size - latent_size], as in RopeArgs
  const int64_t* position;  // [rows]
  int64_t num_positions;
  bool interleaved;
};

void rms_norm(const RmsNormArgs& args);
void silu_mul(const SiluMulArgs& args);
// Both return the first row whose position or slot lies outside the table or the pool (nothing is written then), or -1.
int64_t rope(const RopeArgs& args);
int64_t cache_insert(const CacheInsertArgs& args);
// Likewise, a row number plus the number of rows where the position is at fault.
int64_t latent_insert(const LatentInsertArgs& args);

#define EPRT_ROWWISE_KERNELS(isa)                 \
  namespace isa {                                 \
  void rms_norm(const RmsNormArgs& args);         \
  void silu_mul(const SiluMulArgs& args);         \
  void rope(const RopeArgs& args);                \
  void cache_insert(const CacheInsertArgs& args); \
  }
EPRT_ROWWISE_KERNELS(scalar)
EPRT_ROWWISE_KERNELS(avx2)
EPRT_ROWWISE_KERNELS(avx512)
#undef EPRT_ROWWISE_KERNELS

}  // namespace eprt
