// Draws one token per row of logits: temperature, min_p, top_k, top_p, inverse of the cumulative distribution. Entry
// point.
#pragma once

#include <cstdint>

namespace eprt {

// Everything but logits has `rows` entries. row: which row of logits each draw reads. Meanings as in eprt/ops/draw.py.
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

#define EPRT_DRAW_KERNEL(isa)      \
  namespace isa {                  \
  void draw(const DrawArgs& args); \
  }
EPRT_DRAW_KERNEL(scalar)
EPRT_DRAW_KERNEL(avx2)
EPRT_DRAW_KERNEL(avx512)
#undef EPRT_DRAW_KERNEL

}  // namespace eprt
