// Conversion of rows between float32 and bfloat16.
#pragma once

#include "cpu/vec.h"

namespace eprt {
namespace {

inline int64_t size_of(Dtype type) { return type == Dtype::kFloat32 ? 4 : 2; }
inline const void* element(const void* base, Dtype type, int64_t index) {
  return static_cast<const char*>(base) + index * size_of(type);
}

template <class From, class To>
inline void convert(const From* src, int64_t n, To* dst) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) store(dst + i, load(src + i));
  const int rest = static_cast<int>(n - i);
  if (rest) store_n(dst + i, load_n(src + i, rest), rest);
}
inline void convert(const float* src, int64_t n, float* dst) { std::memcpy(dst, src, n * sizeof(float)); }
inline void convert(const bf16* src, int64_t n, bf16* dst) { std::memcpy(dst, src, n * sizeof(bf16)); }

template <class To>
inline void convert(const void* src, Dtype type, int64_t n, To* dst) {
  if (type == Dtype::kFloat32) return convert(static_cast<const float*>(src), n, dst);
  convert(static_cast<const bf16*>(src), n, dst);
}

}  // namespace
}  // namespace eprt
