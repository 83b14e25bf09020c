#include "cpu/entry_fp8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace eprt {
namespace {

constexpr float kLargest = 448.0f, kSmallestScale = 0x1p-40f;

float value_at(const void* values, Dtype type, int64_t i) {
  if (type == Dtype::kFloat32) return static_cast<const float*>(values)[i];
  return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const bf16*>(values)[i].bits) << 16);
}

// To nearest, ties to even; beyond 448 there is NaN alone.
uint8_t to_e4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80;
  const float size = std::fabs(x);
  if (!(size < 464.0f)) return static_cast<uint8_t>(sign | 0x7f);
  if (size < 0x1p-6f) return static_cast<uint8_t>(sign | std::lrint(size * 512));  // multiples of 2^-9
  const uint32_t cut = (bits & 0x7fffffff) + 0x7ffff + (bits >> 20 & 1);
  return static_cast<uint8_t>(sign | ((cut >> 20) - ((127 - 7) << 3)));
}

uint16_t to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The smallest power of 2 from most / 448 on.
float scale_of(float most) {
  const uint32_t bits = std::bit_cast<uint32_t>(most / kLargest);
  return std::max(std::bit_cast<float>((bits + 0x7fffff) & 0x7f800000), kSmallestScale);
}

}  // namespace

void entries_to_fp8(EntryFp8 format, const void* values, Dtype type, int64_t rows, uint8_t* entries,
                    int64_t entry_bytes) {
  const auto at = [&](int64_t row, int64_t i) { return value_at(values, type, row * format.size + i); };
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t* entry = entries + row * entry_bytes;
    uint8_t* exponent = entry + format.scale_at();
    std::memset(exponent, 0, entry_bytes - format.scale_at());
    for (int64_t first = 0; first < format.plain(); first += EntryFp8::kGroup) {
      const int64_t end = std::min(first + EntryFp8::kGroup, format.plain());
      float most = 0;
      for (int64_t i = first; i < end; ++i) most = std::max(most, std::fabs(at(row, i)));
      const float scale = scale_of(most);
      for (int64_t i = first; i < end; ++i) entry[i] = to_e4m3(at(row, i) / scale);
      *exponent++ = static_cast<uint8_t>(std::bit_cast<uint32_t>(scale) >> 23);
    }
    for (int64_t i = 0; i < format.rope; ++i) {
      const uint16_t turned = to_bf16(at(row, format.plain() + i));
      std::memcpy(entry + format.plain() + 2 * i, &turned, sizeof turned);
    }
  }
}

}  // namespace eprt
