#include "cpu/streams.h"

#include "cpu/isa.h"

namespace eprt {

void stream_mix(const StreamMixArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::stream_mix(args);
    case Isa::kAvx2:
      return avx2::stream_mix(args);
    default:
      return avx512::stream_mix(args);
  }
}

void stream_expand(const StreamExpandArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::stream_expand(args);
    case Isa::kAvx2:
      return avx2::stream_expand(args);
    default:
      return avx512::stream_expand(args);
  }
}

}  // namespace eprt
