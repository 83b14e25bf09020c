// Attention to shared keys (shared_attention.h): the suffix of the file name chooses the compiler's flags.
#include "cpu/shared_attention_kernels.h"

namespace eprt::avx512 {

void shared_attention(const SharedAttentionArgs& args) { shared_attention_any(args); }
void pool_entries(const PoolArgs& args) { pool_entries_any(args); }

}  // namespace eprt::avx512
