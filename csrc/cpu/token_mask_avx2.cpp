#include "cpu/token_mask_kernel.h"

namespace eprt::avx2 {

void mask_row(float* logits, const uint32_t* words, int64_t vocab) { mask_any_row(logits, words, vocab); }

}  // namespace eprt::avx2
