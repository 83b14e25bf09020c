// The operators of KV pages; see ops.cpp. eprt/kv checks pages and sizes.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "cpu/kv_pages.h"

using torch::stable::Tensor;

namespace {

// page: the address of its bytes in the first layer.
int64_t kv_page_checksum(int64_t page, int64_t num_layers, int64_t stride, int64_t page_bytes, int64_t seed) {
  const auto* data = reinterpret_cast<const char*>(page);
  const uint64_t sum = eprt::page_checksum(data, num_layers, stride, page_bytes, static_cast<uint64_t>(seed));
  return static_cast<int64_t>(sum);
}

// from, to: the addresses of two caches.
void kv_copy_pages(int64_t from, int64_t from_stride, Tensor from_pages, int64_t to, int64_t to_stride, Tensor to_pages,
                   int64_t num_layers, int64_t page_bytes) {
  eprt::copy_pages({.from = reinterpret_cast<const char*>(from),
                    .to = reinterpret_cast<char*>(to),
                    .from_pages = from_pages.const_data_ptr<int64_t>(),
                    .to_pages = to_pages.const_data_ptr<int64_t>(),
                    .num_pages = from_pages.numel(),
                    .num_layers = num_layers,
                    .page_bytes = page_bytes,
                    .from_stride = from_stride,
                    .to_stride = to_stride});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eprt, m) {
  m.def("kv_page_checksum(int page, int num_layers, int stride, int page_bytes, int seed) -> int");
  m.def(
      "kv_copy_pages(int from_cache, int from_stride, Tensor from_pages, int to_cache, int to_stride, Tensor to_pages, "
      "int num_layers, int page_bytes) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(eprt, CompositeExplicitAutograd, m) {
  m.impl("kv_page_checksum", TORCH_BOX(&kv_page_checksum));
  m.impl("kv_copy_pages", TORCH_BOX(&kv_copy_pages));
}
