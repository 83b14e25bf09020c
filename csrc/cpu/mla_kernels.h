// Chooses the arithmetic of a call. Included once per instruction set.
#pragma once

#include "cpu/mla_decode_kernel.h"
#include "cpu/mla_extend_kernel.h"
#if defined(__AMX_BF16__)
#include "cpu/mla_gemm_amx.h"
#endif

namespace eprt {
namespace {

// bf16 dot products (fp32 accumulation) if all inputs are bf16 and the CPU has them; otherwise everything in fp32.
inline bool all_bf16(const MlaArgs& args) {
  return args.q_type == Dtype::kBFloat16 && args.kv_type != Dtype::kFloat32 && args.w_type == Dtype::kBFloat16;
}

inline void decode(const MlaArgs& args) {
#if defined(__AMX_BF16__)
  if (all_bf16(args)) return MlaDecode<TileDot>(args).run();
#elif defined(__AVX512BF16__)
  if (all_bf16(args)) return MlaDecode<Bf16Dot>(args).run();
#endif
  MlaDecode<Fp32Dot>(args).run();
}

inline void extend(const MlaArgs& args) {
#if defined(__AMX_BF16__)
  if (all_bf16(args)) return MlaExtend<TileDot>(args).run();
#elif defined(__AVX512BF16__)
  if (all_bf16(args)) return MlaExtend<Bf16Dot>(args).run();
#endif
  MlaExtend<Fp32Dot>(args).run();
}

}  // namespace
}  // namespace eprt
