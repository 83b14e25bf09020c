#include "cpu/draw.h"

#include "cpu/isa.h"

namespace eprt {

void draw(const DrawArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::draw(args);
    case Isa::kAvx2:
      return avx2::draw(args);
    default:
      return avx512::draw(args);
  }
}

void largest(const LargestArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::largest(args);
    case Isa::kAvx2:
      return avx2::largest(args);
    default:
      return avx512::largest(args);
  }
}

}  // namespace eprt
