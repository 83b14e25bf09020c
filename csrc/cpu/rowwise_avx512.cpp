#include "cpu/rowwise_kernels.h"

namespace eprt::avx512 {

void rms_norm(const RmsNormArgs& args) { rms_norm_any(args); }
void silu_mul(const SiluMulArgs& args) { silu_mul_any(args); }
void rope(const RopeArgs& args) { rope_any(args); }
void cache_insert(const CacheInsertArgs& args) { cache_insert_any(args); }

}  // namespace eprt::avx512
