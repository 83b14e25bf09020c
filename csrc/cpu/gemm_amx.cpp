#include "cpu/gemm_kernels.h"

namespace eprt {

const GemmKernels& gemm_kernels_amx(Dtype x, Dtype w) { return gemm_kernels_avx512(x, w); }

}  // namespace eprt
