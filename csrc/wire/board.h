// Board: what is known of the peers and of this rank's own proxy threads, for whoever waits. Any thread may ask and
// tell.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "wire/descriptor.h"

namespace eprt::wire {

// Memory of one rank that others write.
struct Endpoint {
  int rank, num_ranks;
  char* heap;
  uint64_t heap_bytes;
  uint64_t* words;
  uint64_t num_words;
};

// kLost: nothing comes from it any more. kDied: its connection ended without a goodbye, as a killed process's does.
enum class PeerState : int { kPresent = 0, kLeft = 1, kLost = 2, kDied = 3 };

class Board {
 public:
  explicit Board(int num_ranks) : states_(num_ranks), reasons_(num_ranks) {
    for (auto& state : states_) state.store(0, std::memory_order_relaxed);
  }

  PeerState state(int peer) const { return static_cast<PeerState>(states_[peer].load(std::memory_order_acquire)); }

  // The first report of a peer stays.
  void report(int peer, PeerState state, const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (this->state(peer) != PeerState::kPresent) return;
    reasons_[peer] = reason;
    states_[peer].store(static_cast<int>(state), std::memory_order_release);
  }
  std::string reason(int peer) const {
    std::lock_guard lock(mutex_);
    return reasons_[peer];
  }

  // A thread of this rank's proxy has ended, though nobody closed the proxy.
  void break_proxy(const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (broken_.empty()) broken_ = reason;
    is_broken_.store(true, std::memory_order_release);
  }
  // Empty while all threads run.
  std::string broken() const {
    if (!is_broken_.load(std::memory_order_acquire)) return {};
    std::lock_guard lock(mutex_);
    return broken_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::atomic<int>> states_;  // by peer
  std::vector<std::string> reasons_;      // by peer
  std::string broken_;
  std::atomic<bool> is_broken_{false};
};

}  // namespace eprt::wire
