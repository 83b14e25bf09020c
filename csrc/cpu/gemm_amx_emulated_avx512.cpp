// The AMX kernels once more, with emulated tiles and under another name, so that every test run covers their logic,
// also on CPUs without AMX (see emulate_amx in gemm.h).
#ifndef EPRT_EMULATE_AMX
#define EPRT_EMULATE_AMX
#endif
#define gemm_kernels_amx gemm_kernels_amx_emulated
#include "cpu/gemm_amx.cpp"
