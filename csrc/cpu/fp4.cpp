#include "cpu/fp4.h"

#include <bit>
#include <cmath>

#include "cpu/isa.h"

namespace eprt {
namespace {

struct Table {
  Fp4Codes of_scale[256];
  Table() {
    for (int scale = 0; scale < 256; ++scale) {
      for (int code = 0; code < 16; ++code) {
        const uint32_t bits = std::bit_cast<uint32_t>(std::ldexp(kFp4Values[code], scale - 127));
        of_scale[scale].low[code] = static_cast<uint8_t>(bits >> 16);
        of_scale[scale].high[code] = static_cast<uint8_t>(bits >> 24);
      }
    }
  }
};

}  // namespace

void scalar::fp4_to_bf16(const Fp4Codes* of_scale, const uint8_t* data, const uint8_t* scale, int64_t blocks,
                         bf16* out) {
  const auto value = [](const Fp4Codes& codes, int code) {
    return bf16{static_cast<uint16_t>(codes.low[code] | codes.high[code] << 8)};
  };
  for (int64_t b = 0; b < blocks; ++b) {
    const Fp4Codes& codes = of_scale[scale[b]];
    for (int64_t i = b * kFp4Block / 2; i < (b + 1) * kFp4Block / 2; ++i) {
      out[2 * i] = value(codes, data[i] & 15);
      out[2 * i + 1] = value(codes, data[i] >> 4);
    }
  }
}

void fp4_to_bf16(const uint8_t* data, const uint8_t* scale, int64_t blocks, bf16* out) {
  static const Table table;
  const auto widen = cpu_isa() == Isa::kScalar ? scalar::fp4_to_bf16 : avx2::fp4_to_bf16;
  widen(table.of_scale, data, scale, blocks, out);
}

}  // namespace eprt
