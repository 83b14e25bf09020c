// Which instruction set the CPU kernels use. Levels are ordered: each includes those before it.
//
// Code in a *_avx2.cpp, *_avx512.cpp or *_amx.cpp file must live in an anonymous namespace apart from its entry points:
// an inline function emitted there with wider instructions could otherwise be the copy that the linker keeps for
// everyone, and fault on an older CPU.
#pragma once

namespace eprt {

enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// The widest level this CPU and operating system support (AMX needs a permission request, made here once).
Isa detect_isa();

// The level in use: detect_isa() unless set_cpu_isa lowered it.
Isa cpu_isa();

// Lowers the level, for tests and comparisons. A level above detect_isa() is clamped to it.
void set_cpu_isa(Isa isa);

}  // namespace eprt
