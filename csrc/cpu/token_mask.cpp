#include "cpu/token_mask.h"

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/team.h"

namespace eprt {
namespace {

constexpr int64_t kSmall = 1 << 18;  // logits that one thread masks sooner than several are at it

auto row_kernel() {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::mask_row;
    case Isa::kAvx2:
      return avx2::mask_row;
    default:
      return avx512::mask_row;
  }
}

}  // namespace

void mask_tokens(const TokenMaskArgs& args) {
  const auto mask_row = row_kernel();
  const bool is_small = args.rows * args.vocab < kSmall;
  parallel_for(args.rows, is_small ? 1 : args.num_threads, [&](int64_t i) {
    mask_row(args.logits + args.row[i] * args.logits_row, args.words + i * args.words_per_row, args.vocab);
  });
}

}  // namespace eprt
