#include "cpu/turned_rows.h"

#include "cpu/isa.h"

namespace eprt {

int64_t turned_rows(const TurnedRowsArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    if (args.position[row] < 0 || args.position[row] >= args.num_positions) return row;
  }
  switch (cpu_isa()) {
    case Isa::kScalar:
      scalar::turned_rows(args);
      break;
    case Isa::kAvx2:
      avx2::turned_rows(args);
      break;
    default:
      avx512::turned_rows(args);
  }
  return -1;
}

}  // namespace eprt
