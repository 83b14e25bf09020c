// Which instruction set the CPU kernels use. Levels are ordered: each includes those before it.
//
// Code in a *_avx2.cpp, *_avx512.cpp or *_amx.cpp file must be in an anonymous namespace, except for its entry points.
// Otherwise the linker could keep the copy of an inline function that was compiled there with wider instructions, for
// all callers, and it would fault on an older CPU.
#pragma once

namespace eprt {

enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// The widest level that this CPU and operating system support (requests permission for AMX once).
Isa detect_isa();

// The level in use: detect_isa() unless set_cpu_isa lowered it.
Isa cpu_isa();

// Lowers the level, for tests and comparisons. A level above detect_isa() is clamped to it.
void set_cpu_isa(Isa isa);

}  // namespace eprt
