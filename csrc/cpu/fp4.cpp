#include "cpu/fp4.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/team.h"

namespace eprt {
namespace {

constexpr float kValues[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
constexpr int64_t kMinValuesPerThread = 1 << 16;

struct Table {  // every code under every scale, in bf16
  uint16_t bits[256][16];
  Table() {
    for (int scale = 0; scale < 256; ++scale) {
      for (int code = 0; code < 16; ++code) {
        bits[scale][code] =
            static_cast<uint16_t>(std::bit_cast<uint32_t>(std::ldexp(kValues[code], scale - 127)) >> 16);
      }
    }
  }
};

void widen_block(const uint8_t* data, const uint16_t* bits, bf16* out) {
  for (int64_t i = 0; i < kFp4Block / 2; ++i) {
    out[2 * i].bits = bits[data[i] & 15];
    out[2 * i + 1].bits = bits[data[i] >> 4];
  }
}

}  // namespace

void fp4_to_bf16(const uint8_t* data, const uint8_t* scale, int64_t rows, int64_t k, bf16* out, int num_threads) {
  static const Table table;
  const int64_t blocks = rows * k / kFp4Block;
  const int64_t team = std::clamp<int64_t>(rows * k / kMinValuesPerThread, 1, std::max(num_threads, 1));
  parallel_for(team, num_threads, [&](int64_t share) {
    for (int64_t i = blocks * share / team; i < blocks * (share + 1) / team; ++i) {
      widen_block(data + i * kFp4Block / 2, table.bits[scale[i]], out + i * kFp4Block);
    }
  });
}

}  // namespace eprt
