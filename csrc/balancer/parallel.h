// Plans layers in parallel: they are independent of each other, and threads claim them dynamically.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace eprt::balancer {

// Calls body(layer) for each layer on up to `threads` threads and rethrows the first exception. The results do not
// depend on the number of threads as long as body(layer) writes only its own layer's data.
template <typename Body>
void for_each_layer(int64_t num_layers, int64_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  auto work = [&] {
    for (int64_t layer; (layer = next.fetch_add(1)) < num_layers;) {
      try {
        body(layer);
      } catch (...) {
        std::lock_guard<std::mutex> lock(failure_mutex);
        if (!failure) failure = std::current_exception();
        next = num_layers;
      }
    }
  };
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < std::min(threads, num_layers); i++) helpers.emplace_back(work);
  work();
  for (auto& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace eprt::balancer
