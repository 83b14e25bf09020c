// Entries of DeepSeek V4 in fp8 (eprt/ops/entry_format.py): values that are not rotated in e4m3, rotated ones in
// bfloat16, then the scale of each 64 of the former as the exponent of a power of 2.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace eprt {

struct EntryFp8 {
  static constexpr int64_t kGroup = 64;

  int64_t size, rope;  // values; of these the last ones, which are rotated

  int64_t plain() const { return size - rope; }
  int64_t scale_at() const { return plain() + 2 * rope; }  // bytes
  int64_t scales() const { return (plain() + kGroup - 1) / kGroup; }
};

// values [rows, size] -> entries [rows, entry_bytes], padded with zeros.
void entries_to_fp8(EntryFp8 format, const void* values, Dtype type, int64_t rows, uint8_t* entries,
                    int64_t entry_bytes);

}  // namespace eprt
