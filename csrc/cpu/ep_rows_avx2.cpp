#define EPRT_LANES 8
#include "cpu/ep_rows_impl.h"

namespace eprt::ep {
const RowKernels& row_kernels_avx2() { return kKernels; }
}  // namespace eprt::ep
