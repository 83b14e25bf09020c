// Buffer: uninitialised, cache-line aligned scratch memory of one call.
//
// Internal linkage, because kernels compiled for wide instruction sets use it (see isa.h).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace eprt {
namespace {

template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size) {
    const size_t num_bytes = (static_cast<size_t>(size) * sizeof(T) + 127) / 64 * 64;
    data_ = static_cast<T*>(std::aligned_alloc(64, num_bytes));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* get() const { return data_; }

 private:
  T* data_;
};

}  // namespace
}  // namespace eprt
