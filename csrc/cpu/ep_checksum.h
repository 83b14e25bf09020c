// A checksum of memory that is copied between ranks. It detects broken copies (torn, swapped, stale or missing pieces),
// not manipulation by an adversary. Runs at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eprt::ep {

// The checksum of num_bytes at data. Checksums of several pieces are chained by passing each as the seed of the next.
uint64_t checksum(const void* data, size_t num_bytes, uint64_t seed);

}  // namespace eprt::ep
