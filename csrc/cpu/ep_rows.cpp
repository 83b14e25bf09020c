#include "cpu/ep_rows.h"

#include "cpu/isa.h"

namespace eprt::ep {

const RowKernels& row_kernels_scalar();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

const RowKernels& row_kernels() {
  const Isa isa = cpu_isa();
  if (isa >= Isa::kAvx512) return row_kernels_avx512();
  return isa == Isa::kAvx2 ? row_kernels_avx2() : row_kernels_scalar();
}

}  // namespace eprt::ep
