// The AMX kernels with emulated tiles, under another name, so that tests cover their logic on CPUs without AMX too (see
// emulate_amx in gemm.h).
#ifndef EPRT_EMULATE_AMX
#define EPRT_EMULATE_AMX
#endif
#define gemm_kernels_amx gemm_kernels_amx_emulated
#include "cpu/gemm_amx.cpp"
