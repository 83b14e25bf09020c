#include "cpu/rowwise.h"

#include "cpu/isa.h"

namespace eprt {
namespace {

int64_t first_outside(const int64_t* index, int64_t n, int64_t limit) {
  for (int64_t i = 0; i < n; ++i) {
    if (index[i] < 0 || index[i] >= limit) return i;
  }
  return -1;
}

}  // namespace

void rms_norm(const RmsNormArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::rms_norm(args);
    case Isa::kAvx2:
      return avx2::rms_norm(args);
    default:
      return avx512::rms_norm(args);
  }
}

void silu_mul(const SiluMulArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::silu_mul(args);
    case Isa::kAvx2:
      return avx2::silu_mul(args);
    default:
      return avx512::silu_mul(args);
  }
}

int64_t rope(const RopeArgs& args) {
  const int64_t bad = first_outside(args.position, args.rows, args.num_positions);
  if (bad >= 0) return bad;
  switch (cpu_isa()) {
    case Isa::kScalar:
      scalar::rope(args);
      break;
    case Isa::kAvx2:
      avx2::rope(args);
      break;
    default:
      avx512::rope(args);
  }
  return -1;
}

int64_t cache_insert(const CacheInsertArgs& args) {
  const int64_t bad = first_outside(args.slot, args.rows, args.num_pages * args.page_size);
  if (bad >= 0) return bad;
  switch (cpu_isa()) {
    case Isa::kScalar:
      scalar::cache_insert(args);
      break;
    case Isa::kAvx2:
      avx2::cache_insert(args);
      break;
    default:
      avx512::cache_insert(args);
  }
  return -1;
}

}  // namespace eprt
