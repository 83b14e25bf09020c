// One row of logits under one mask, included once per instruction set: the compiler turns a word's 32 lanes into
// vectors. Without branches on bits, which no CPU predicts: about half of a vocabulary is forbidden in most masks.
#pragma once

#include <limits>

#include "cpu/token_mask.h"

namespace eprt {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr int kWordBits = 32;

inline void mask_any_row(float* logits, const uint32_t* words, int64_t vocab) {
  const int64_t whole = vocab / kWordBits;
  for (int64_t w = 0; w < whole; ++w) {
    const uint32_t word = words[w];
    float* lanes = logits + w * kWordBits;
#pragma omp simd
    for (int i = 0; i < kWordBits; ++i) lanes[i] = (word >> i & 1) != 0 ? lanes[i] : kForbidden;
  }
  for (int64_t i = whole * kWordBits; i < vocab; ++i) {
    if ((words[whole] >> i % kWordBits & 1) == 0) logits[i] = kForbidden;
  }
}

}  // namespace
}  // namespace eprt
