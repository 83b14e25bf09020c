// A checksum of memory on its way from one rank to another: finds what a broken copy does (torn, swapped, stale or
// missing pieces), not what an adversary would. Runs at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eprt::ep {

// Of num_bytes at data, following on from `seed`: the checksum of pieces is chained by passing each on to the next.
uint64_t checksum(const void* data, size_t num_bytes, uint64_t seed);

}  // namespace eprt::ep
