#include "cpu/token_mask.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <limits>

namespace eprt {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr int64_t kSmall = 1 << 18;  // logits that one thread masks sooner than several are at it

void mask_row(float* logits, const uint32_t* words, int64_t vocab) {
  for (int64_t first = 0; first < vocab; first += 32) {
    uint32_t forbidden = ~words[first / 32];
    const int64_t count = std::min<int64_t>(32, vocab - first);
    if (count < 32) forbidden &= (1u << count) - 1;
    if (forbidden == ~0u) {
      std::fill_n(logits + first, 32, kForbidden);
      continue;
    }
    for (; forbidden != 0; forbidden &= forbidden - 1) logits[first + std::countr_zero(forbidden)] = kForbidden;
  }
}

}  // namespace

void mask_tokens(const TokenMaskArgs& args) {
  const bool is_small = args.rows * args.vocab < kSmall;
  const int team = is_small ? 1 : static_cast<int>(std::min<int64_t>(args.num_threads, args.rows));
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
  for (int64_t i = 0; i < args.rows; ++i) {
    mask_row(args.logits + args.row[i] * args.logits_row, args.words + i * args.words_per_row, args.vocab);
  }
}

}  // namespace eprt
