#include "cpu/ep_checksum.h"

#include <cstring>

namespace eprt::ep {
namespace {

// Odd multipliers make each step a bijection of the state, so that no difference is lost.
constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15;
constexpr int kLanes = 4;  // independent chains: a multiplication takes longer than the load of its operand

uint64_t mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * kMultiplier;
  return state ^ (state >> 32);
}

}  // namespace

uint64_t checksum(const void* data, size_t num_bytes, uint64_t seed) {
  const char* at = static_cast<const char*>(data);
  uint64_t lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = mix(seed, i + 1);
  size_t left = num_bytes;
  for (; left >= sizeof lane; left -= sizeof lane, at += sizeof lane) {
    uint64_t word[kLanes];
    std::memcpy(word, at, sizeof word);
    for (int i = 0; i < kLanes; ++i) lane[i] = mix(lane[i], word[i]);
  }
  uint64_t tail[kLanes] = {};
  std::memcpy(tail, at, left);
  uint64_t sum = mix(seed, num_bytes);
  for (int i = 0; i < kLanes; ++i) sum = mix(mix(sum, lane[i]), tail[i]);
  return sum;
}

}  // namespace eprt::ep
