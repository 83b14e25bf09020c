// DescriptorRing: the queue between one producer and the proxy, and the words by which ranks tell each other what is
// complete. docs/wire.md has the contract.
//
// The memory belongs to the caller: plain where a CPU produces, pinned where a GPU is to. A producer only stores, the
// ticket last, so that a store with release from any processor is enough. Knows nothing of peers and transports.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

namespace eprt::wire {

constexpr size_t kLine = 64;

enum class Operation : uint32_t { kPut = 1, kPost = 2 };

struct Request {
  Operation operation;
  int32_t peer;
  uint64_t source;  // put: address of the first byte; post: the value
  uint64_t target;  // put: first byte in the peer's heap; post: number of the word
  uint32_t bytes;   // of a put
};

struct Descriptor {
  uint64_t source, target;
  uint64_t what;                 // bytes << 32 | peer << 2 | operation
  std::atomic<uint64_t> ticket;  // the request's number on this ring, from 1; written last
};
static_assert(sizeof(Descriptor) == 32);

class DescriptorRing {
 public:
  static size_t num_bytes(uint32_t capacity) { return 2 * kLine + size_t{capacity} * sizeof(Descriptor); }

  // memory: num_bytes(capacity), zero, aligned to kLine. capacity: a power of 2.
  DescriptorRing(void* memory, uint32_t capacity)
      : taken_(new (memory) std::atomic<uint64_t>(0)),
        completed_(new (static_cast<char*>(memory) + kLine) std::atomic<uint64_t>(0)),
        slots_(reinterpret_cast<Descriptor*>(static_cast<char*>(memory) + 2 * kLine)),
        capacity_(capacity) {
    if (capacity == 0 || (capacity & (capacity - 1)) != 0)
      throw std::invalid_argument("a ring of " + std::to_string(capacity) + " descriptors: must be a power of 2");
    for (uint32_t i = 0; i < capacity; ++i) new (&slots_[i]) Descriptor{};
  }

  // ---- the producer ----

  // False while the ring is full.
  bool try_push(const Request& request) {
    if (pushed_ - taken_seen_ >= capacity_) {
      taken_seen_ = taken_->load(std::memory_order_acquire);
      if (pushed_ - taken_seen_ >= capacity_) return false;
    }
    Descriptor& slot = slots_[pushed_ & (capacity_ - 1)];
    slot.source = request.source;
    slot.target = request.target;
    slot.what = uint64_t{request.bytes} << 32 | uint64_t(request.peer) << 2 | uint64_t(request.operation);
    slot.ticket.store(++pushed_, std::memory_order_release);
    return true;
  }
  uint64_t pushed() const { return pushed_; }
  // Requests up to this number are complete: what they put may be overwritten. Any thread may ask.
  uint64_t completed() const { return completed_->load(std::memory_order_acquire); }

  // ---- the proxy ----

  std::optional<Request> front() const {
    const Descriptor& slot = slots_[taken_here_ & (capacity_ - 1)];
    if (slot.ticket.load(std::memory_order_acquire) != taken_here_ + 1) return std::nullopt;
    return Request{static_cast<Operation>(slot.what & 3), static_cast<int32_t>(slot.what >> 2 & 0x3FFFFFFF),
                   slot.source, slot.target, static_cast<uint32_t>(slot.what >> 32)};
  }
  void pop() { taken_->store(++taken_here_, std::memory_order_release); }
  void complete_next() { completed_->store(++completed_here_, std::memory_order_release); }
  bool is_idle() const { return completed_here_ == taken_here_ && !front(); }

 private:
  std::atomic<uint64_t>*const taken_, *const completed_;
  Descriptor* const slots_;
  const uint32_t capacity_;
  alignas(kLine) uint64_t pushed_ = 0;      // the producer's
  uint64_t taken_seen_ = 0;                 // the producer's
  alignas(kLine) uint64_t taken_here_ = 0;  // the proxy's
  uint64_t completed_here_ = 0;             // the proxy's
};

// A word has one writer, a channel of a rank, and its values grow: a repeated or late value changes nothing.
inline void advance_word(uint64_t* word, uint64_t value) {
  std::atomic_ref<uint64_t> shared(*word);
  if (shared.load(std::memory_order_relaxed) < value) shared.store(value, std::memory_order_release);
}

// With what was put before the word was posted.
inline uint64_t read_word(uint64_t* word) { return std::atomic_ref<uint64_t>(*word).load(std::memory_order_acquire); }

}  // namespace eprt::wire
