// Element types: Dtype, the tag that ops.cpp passes to the kernels, and the structs that elements have in memory.
#pragma once

#include <cstdint>

namespace eprt {

enum class Dtype { kFloat32, kBFloat16, kFp8E4M3, kInt8, kFp4 };

struct bf16 {  // the upper half of an fp32
  uint16_t bits;
};
struct fp8 {  // e4m3fn: no infinities, 0x7f and 0xff are NaN
  uint8_t bits;
};

}  // namespace eprt
