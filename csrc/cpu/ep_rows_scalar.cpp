#define EPRT_LANES 4
#include "cpu/ep_rows_impl.h"

namespace eprt::ep {
const RowKernels& row_kernels_scalar() { return kKernels; }
}  // namespace eprt::ep
