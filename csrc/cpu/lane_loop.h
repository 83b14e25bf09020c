// Loops over the registers of a row, and whether rows are worth several threads.
#pragma once

#include "cpu/convert.h"

namespace eprt {
namespace {

// For fewer values, waking the other threads costs more than it saves.
constexpr int64_t kParallelSize = 1 << 15;

inline int threads_for(int num_threads, int64_t values) { return values > kParallelSize ? num_threads : 1; }

// Calls visit(i, load, store) for each register of a row of n, the last one masked.
template <class Visit>
inline void for_lanes(int64_t n, Visit visit) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) {
    visit(i, [](auto* p) { return load(p); }, [](auto* p, Vec a) { store(p, a); });
  }
  const int rest = static_cast<int>(n - i);
  if (rest) {
    visit(i, [rest](auto* p) { return load_n(p, rest); }, [rest](auto* p, Vec a) { store_n(p, a, rest); });
  }
}

}  // namespace
}  // namespace eprt
