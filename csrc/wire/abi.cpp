// The C ABI of the wire, called through ctypes (eprt/ep/wire/library.py). Functions that can fail return -1, and
// eprt_wire_error() its message, of the calling thread.

#include <algorithm>
#include <exception>
#include <memory>
#include <string>

#include "wire/mailbox.h"
#include "wire/paced_lane.h"
#include "wire/proxy.h"
#include "wire/tcp_lane.h"

#define EPRT_ABI extern "C" __attribute__((visibility("default")))

using namespace eprt::wire;

namespace {

struct CShape {
  int64_t rank, num_ranks, num_threads, num_channels, ring_capacity, arena_bytes, silence_ns, spin_ns;
};

struct CPace {
  double bytes_per_ns;
  int64_t latency_ns, per_request_ns;
  int64_t seed, reorder_ns;
  double delay_words, repeat_words;
  int64_t word_delay_ns;
};

// All of one rank. Members end in reverse order: the threads first.
struct Wire {
  std::unique_ptr<char[]> memory;  // where the transport does not give it
  Board board;
  Endpoint local;
  std::unique_ptr<Proxy> proxy;
  std::unique_ptr<Mailbox> mailbox;

  explicit Wire(const CShape& shape) : board(shape.num_ranks) {
    local = {static_cast<int>(shape.rank),
             static_cast<int>(shape.num_ranks),
             nullptr,
             Mailbox::heap_bytes(shape.num_ranks, shape.arena_bytes),
             nullptr,
             Mailbox::num_words(shape.num_ranks)};
  }
  ~Wire() {
    if (proxy) proxy->stop();
  }

  void start(const CShape& shape, const Proxy::MakeLane& make_lane) {
    const Proxy::Options options{static_cast<int>(shape.num_threads), static_cast<int>(shape.num_channels),
                                 static_cast<uint32_t>(shape.ring_capacity), shape.spin_ns};
    proxy = std::make_unique<Proxy>(options, local, board, make_lane);
    mailbox = std::make_unique<Mailbox>(*proxy, board, local, shape.arena_bytes);
    proxy->start([this] { mailbox->progress(); });
  }
};

thread_local std::string last_error;

template <typename Body>
int64_t guarded(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

Wire& wire_at(int64_t self) { return *reinterpret_cast<Wire*>(self); }

}  // namespace

EPRT_ABI const char* eprt_wire_error() { return last_error.c_str(); }

// Must be increased when a signature below changes: library.py refuses a library of another version.
EPRT_ABI int eprt_wire_version() { return 1; }

// sockets: connected streams [num_threads, num_ranks], -1 for ranks that this wire does not reach; the wire closes
// them.
EPRT_ABI int64_t eprt_wire_open_tcp(const CShape* shape, const int32_t* sockets) {
  return guarded([&] {
    auto wire = std::make_unique<Wire>(*shape);
    const size_t words_bytes = wire->local.num_words * sizeof(uint64_t);
    // Not cleared but where it must be: the pages of arenas that nothing comes into take no memory.
    wire->memory.reset(new char[words_bytes + wire->local.heap_bytes + kLine]);
    char* base = wire->memory.get() + (kLine - reinterpret_cast<uintptr_t>(wire->memory.get()) % kLine) % kLine;
    wire->local.words = reinterpret_cast<uint64_t*>(base);
    wire->local.heap = base + words_bytes;
    std::fill_n(wire->local.words, wire->local.num_words, 0);
    wire->start(*shape, [&](int thread, std::vector<DescriptorRing>& rings) {
      const int32_t* first = sockets + thread * shape->num_ranks;
      TcpLane::Setup setup{thread, {first, first + shape->num_ranks}, shape->silence_ns, shape->silence_ns / 8};
      return std::make_unique<TcpLane>(wire->local, std::move(setup), wire->board, rings);
    });
    return reinterpret_cast<int64_t>(wire.release());
  });
}

EPRT_ABI int64_t eprt_wire_segment_bytes(const CShape* shape) {
  return PacedSegment::num_bytes(shape->num_threads, Mailbox::num_words(shape->num_ranks),
                                 Mailbox::heap_bytes(shape->num_ranks, shape->arena_bytes));
}

// segments: of every rank, zero at first, as this process maps them; null for ranks that this wire does not reach.
EPRT_ABI int64_t eprt_wire_open_paced(const CShape* shape, const int64_t* segments, const CPace* pace) {
  return guarded([&] {
    auto wire = std::make_unique<Wire>(*shape);
    std::vector<char*> bases;
    for (int64_t rank = 0; rank < shape->num_ranks; ++rank) bases.push_back(reinterpret_cast<char*>(segments[rank]));
    const PacedSegment own(bases.at(shape->rank), shape->num_threads, wire->local.num_words);
    wire->local.words = own.words;
    wire->local.heap = own.heap;
    const auto nic = std::make_shared<PacedNic>(Pace{pace->bytes_per_ns, pace->latency_ns, pace->per_request_ns});
    const Disturbance disturbance{static_cast<uint64_t>(pace->seed), pace->reorder_ns, pace->delay_words,
                                  pace->repeat_words, pace->word_delay_ns};
    wire->start(*shape, [&](int thread, std::vector<DescriptorRing>& rings) {
      PacedLane::Setup setup{thread, static_cast<int>(shape->num_threads), bases, nic, disturbance, shape->silence_ns};
      return std::make_unique<PacedLane>(wire->local, std::move(setup), wire->board, rings);
    });
    return reinterpret_cast<int64_t>(wire.release());
  });
}

// Sends what is under way, within some seconds, and ends all threads.
EPRT_ABI void eprt_wire_close(int64_t self) { delete &wire_at(self); }

// The number of the message.
EPRT_ABI int64_t eprt_wire_send(int64_t self, int64_t peer, int64_t tag, int64_t data, int64_t bytes) {
  return guarded([&] {
    return wire_at(self).mailbox->send(static_cast<int>(peer), tag, reinterpret_cast<const char*>(data), bytes);
  });
}
EPRT_ABI int64_t eprt_wire_receive(int64_t self, int64_t peer, int64_t tag, int64_t data, int64_t room) {
  return guarded(
      [&] { return wire_at(self).mailbox->receive(static_cast<int>(peer), tag, reinterpret_cast<char*>(data), room); });
}

// 1: done. 0: not yet. -1: it can no longer finish.
EPRT_ABI int64_t eprt_wire_test(int64_t self, int64_t message) {
  return guarded([&]() -> int64_t { return wire_at(self).mailbox->test(message) ? 1 : 0; });
}
EPRT_ABI void eprt_wire_cancel(int64_t self, int64_t message) { wire_at(self).mailbox->cancel(message); }

// 0: present. 1: has left. 2: lost. 3: has died.
EPRT_ABI int64_t eprt_wire_peer_state(int64_t self, int64_t peer) {
  return static_cast<int64_t>(wire_at(self).board.state(static_cast<int>(peer)));
}

// Fault injection: a proxy thread of this rank ends, as if by an error.
EPRT_ABI void eprt_wire_end_thread(int64_t self, int64_t thread) {
  wire_at(self).proxy->end_thread(static_cast<int>(thread));
}
