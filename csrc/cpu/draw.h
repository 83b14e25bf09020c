// Entry points of sampling: the largest logit of each row, and the draw, one token per row of logits by temperature,
// min_p, top_k, top_p and the inverse of the cumulative distribution.
#pragma once

#include <cstdint>

namespace eprt {

// Every array but logits has `rows` entries. row: the row of logits that each draw reads. See eprt/ops/draw.py.
struct DrawArgs {
  const float* logits;  // [any, vocab]
  int64_t logits_row;   // elements between rows
  const int64_t* row;
  const float* temperature;
  const double* min_p;
  const int64_t* top_k;
  const double* top_p;
  const double* u;
  int64_t* token;
  int64_t rows, vocab;
  int num_threads;
};

void draw(const DrawArgs& args);

struct LargestArgs {
  const float* logits;  // [rows, vocab]
  int64_t logits_row;   // elements between rows
  int64_t* token;       // [rows]: the first of the largest logits; -1 where a logit is NaN or the largest is infinite
  int64_t rows, vocab;
  int num_threads;
};

void largest(const LargestArgs& args);

#define EPRT_DRAW_KERNEL(isa)            \
  namespace isa {                        \
  void draw(const DrawArgs& args);       \
  void largest(const LargestArgs& args); \
  }
EPRT_DRAW_KERNEL(scalar)
EPRT_DRAW_KERNEL(avx2)
EPRT_DRAW_KERNEL(avx512)
#undef EPRT_DRAW_KERNEL

}  // namespace eprt
