#include "cpu/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace eprt {
namespace {

// Linux grants the 8 KB AMX tile state only on request (arch_prctl, Documentation/arch/x86/xstate.rst).
bool request_amx() {
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

bool has_amx_bf16_int8() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  return (edx & kAmxBf16) && (edx & kAmxTile) && (edx & kAmxInt8);
}

Isa probe() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kScalar;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
  if (!avx512) return Isa::kAvx2;
#ifdef EPRT_EMULATE_AMX
  return Isa::kAmx;
#endif
  return has_amx_bf16_int8() && request_amx() ? Isa::kAmx : Isa::kAvx512;
}

std::atomic<int> g_isa{-1};

}  // namespace

Isa detect_isa() {
  static const Isa isa = probe();
  return isa;
}

Isa cpu_isa() {
  const int isa = g_isa.load(std::memory_order_relaxed);
  return isa < 0 ? detect_isa() : static_cast<Isa>(isa);
}

void set_cpu_isa(Isa isa) { g_isa.store(std::min(static_cast<int>(isa), static_cast<int>(detect_isa()))); }

}  // namespace eprt
