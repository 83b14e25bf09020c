// Takes the tokens away that the masks of some rows of logits forbid.
#pragma once

#include <cstdint>

namespace eprt {

struct TokenMaskArgs {
  float* logits;          // [any, vocab]; those of forbidden tokens become minus infinity
  int64_t logits_row;     // elements between rows
  const uint32_t* words;  // [rows, words_per_row]: bit i % 32 of word i / 32 allows token i
  int64_t words_per_row;  // at least vocab / 32
  const int64_t* row;     // [rows]: the row of logits that each mask is for
  int64_t rows, vocab;
  int num_threads;
};

void mask_tokens(const TokenMaskArgs& args);

#define EPRT_TOKEN_MASK_KERNEL(isa)                                   \
  namespace isa {                                                     \
  void mask_row(float* logits, const uint32_t* words, int64_t vocab); \
  }
EPRT_TOKEN_MASK_KERNEL(scalar)
EPRT_TOKEN_MASK_KERNEL(avx2)
EPRT_TOKEN_MASK_KERNEL(avx512)
#undef EPRT_TOKEN_MASK_KERNEL

}  // namespace eprt
