#define EPRT_LANES 16
#include "cpu/ep_rows_impl.h"

namespace eprt::ep {
const RowKernels& row_kernels_avx512() { return kKernels; }
}  // namespace eprt::ep
