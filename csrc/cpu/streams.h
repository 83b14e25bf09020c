// Hyper-connections (DeepSeek V4): M residual streams of H values each, mixed around every sublayer.
//
//   p = fn . x / sqrt(mean(x^2) + norm_eps), over all M * H values of a row
//   row    = sum_m (sigmoid(p_m * scale_0 + base_m) + eps) * x_m
//   post_m = 2 * sigmoid(p_(M + m) * scale_1 + base_(M + m))
//   comb   = softmax of each row of p_(2M..) * scale_2 + base_(2M..), + eps; its columns, then rows and columns in turn
//            divided by their sum + eps: `iterations` times the columns in all
//   mixed_k = sum_j comb[j, k] * x_j
//
// and a sublayer's output y makes stream k  mixed_k + post_k * y. Everything in fp32, each row by itself.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace eprt {

constexpr int64_t kMaxStreams = 16;

// All tensors are contiguous.
struct StreamMixArgs {
  const void* x;       // [rows, streams, size]
  Dtype type;          // of x and of row
  const float* fn;     // [outputs, streams * size]; outputs = streams * (2 + streams), of a head: streams
  const float* base;   // [outputs]
  const float* scale;  // [3], of a head: [1]
  void* row;           // [rows, size]
  float* mixed;        // [rows, streams, size]; null for a head
  float* post;         // [rows, streams]; null for a head
  int64_t rows, streams, size, iterations;
  float eps, norm_eps;
  int num_threads;

  int64_t outputs() const { return mixed == nullptr ? streams : streams * (2 + streams); }
};

struct StreamExpandArgs {
  const float* mixed;  // [rows, streams, size]
  const float* post;   // [rows, streams]
  const void* y;       // [rows, size]
  void* out;           // [rows, streams, size]
  Dtype type;          // of y and out
  int64_t rows, streams, size;
  int num_threads;
};

void stream_mix(const StreamMixArgs& args);
void stream_expand(const StreamExpandArgs& args);

#define EPRT_STREAM_KERNELS(isa)                    \
  namespace isa {                                   \
  void stream_mix(const StreamMixArgs& args);       \
  void stream_expand(const StreamExpandArgs& args); \
  }
EPRT_STREAM_KERNELS(scalar)
EPRT_STREAM_KERNELS(avx2)
EPRT_STREAM_KERNELS(avx512)
#undef EPRT_STREAM_KERNELS

}  // namespace eprt
