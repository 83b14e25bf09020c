// Ranks of the wire as threads of one process, for ThreadSanitizer; and the words of a test.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "wire/mailbox.h"
#include "wire/paced_lane.h"
#include "wire/proxy.h"
#include "wire/tcp_lane.h"

using namespace eprt::wire;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                \
    }                                                                               \
  } while (0)

constexpr int64_t kPatienceNs = 120'000'000'000;  // nothing here is about speed

inline void wait_for(const std::function<bool()>& condition, const char* what) {
  const int64_t deadline = now_ns() + kPatienceNs;
  while (!condition()) {
    if (now_ns() > deadline) {
      std::fprintf(stderr, "waited too long for %s\n", what);
      std::_Exit(1);
    }
    std::this_thread::yield();
  }
}

struct Rank {
  Board board;
  Endpoint local;
  std::vector<char> memory;
  std::unique_ptr<Proxy> proxy;
  std::unique_ptr<Mailbox> mailbox;

  Rank(int rank, int num_ranks, uint64_t heap_bytes, uint64_t num_words) : board(num_ranks) {
    local = {rank, num_ranks, nullptr, heap_bytes, nullptr, num_words};
  }
  void wait_word(uint64_t word, uint64_t value) {
    wait_for([&] { return read_word(local.words + word) >= value; }, "a word");
  }
  void push(int channel, const Request& request) {
    wait_for([&] { return proxy->try_push(channel, request); }, "room in a ring");
  }
  bool is_done(int64_t message) { return mailbox->test(message); }
  // The reason with which a message fails.
  std::string failure(int64_t message) {
    std::string reason;
    wait_for(
        [&] {
          try {
            CHECK(!mailbox->test(message));
          } catch (const std::runtime_error& error) {
            reason = error.what();
          }
          return !reason.empty();
        },
        "a failure");
    return reason;
  }
};

struct Terms {
  int num_ranks = 3, num_threads = 2, num_channels = 4;
  uint32_t ring_capacity = 16;
  uint64_t arena_bytes = 4096;  // of a mailbox; 0: none, then heap_bytes and num_words
  uint64_t heap_bytes = 0, num_words = 0;
  int64_t silence_ns = kPatienceNs;
  Pace pace;
  Disturbance disturbance;
};

class Cluster {
 public:
  std::vector<std::unique_ptr<Rank>> ranks;

  // over: "paced" or "tcp". absent: a rank that never starts, or -1.
  Cluster(const Terms& terms, const std::string& over, int absent = -1) : terms_(terms), absent_(absent) {
    const int n = terms.num_ranks;
    const uint64_t heap = terms.arena_bytes ? Mailbox::heap_bytes(n, terms.arena_bytes) : terms.heap_bytes;
    const uint64_t words = terms.arena_bytes ? Mailbox::num_words(n) : terms.num_words;
    const size_t bytes = PacedSegment::num_bytes(terms.num_threads, words, heap);
    std::vector<char*> segments;
    for (int rank = 0; rank < n; ++rank) {
      Rank& r = *ranks.emplace_back(new Rank(rank, n, heap, words));
      r.memory.assign(bytes + kLine, 0);
      char* base = r.memory.data() + (kLine - reinterpret_cast<uintptr_t>(r.memory.data()) % kLine) % kLine;
      segments.push_back(base);
      const PacedSegment own(base, terms.num_threads, words);
      r.local.words = own.words;
      r.local.heap = own.heap;
    }
    if (over == "tcp") connect_sockets();
    for (int rank = 0; rank < n; ++rank)
      if (rank != absent) start(rank, over, segments);
  }
  ~Cluster() {
    if (absent_ >= 0)
      for (const auto& of_thread : sockets_)
        for (const int socket : of_thread[absent_])
          if (socket >= 0) close(socket);
    std::vector<std::thread> stopping;
    for (auto& rank : ranks)
      if (rank->proxy) stopping.emplace_back([&rank] { rank->proxy->stop(); });
    for (auto& one : stopping) one.join();
  }
  int socket(int thread, int from, int to) const { return sockets_[thread][from][to]; }
  void run(const std::function<void(Rank&)>& body) {
    std::vector<std::thread> running;
    for (auto& rank : ranks) running.emplace_back([&body, &rank] { body(*rank); });
    for (auto& one : running) one.join();
  }

 private:
  void connect_sockets() {
    const int n = terms_.num_ranks;
    sockets_.assign(terms_.num_threads, std::vector<std::vector<int>>(n, std::vector<int>(n, -1)));
    for (auto& of_thread : sockets_)
      for (int a = 0; a < n; ++a)
        for (int b = a + 1; b < n; ++b) {
          int pair[2];
          CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
          of_thread[a][b] = pair[0];
          of_thread[b][a] = pair[1];
        }
  }
  void start(int rank, const std::string& over, const std::vector<char*>& segments) {
    Rank& r = *ranks[rank];
    const Proxy::Options options{terms_.num_threads, terms_.num_channels, terms_.ring_capacity, 0};
    const auto nic = std::make_shared<PacedNic>(terms_.pace);
    r.proxy = std::make_unique<Proxy>(
        options, r.local, r.board, [&](int thread, std::vector<DescriptorRing>& rings) -> std::unique_ptr<Lane> {
          if (over == "tcp") {
            TcpLane::Setup setup{thread, sockets_[thread][rank], terms_.silence_ns, terms_.silence_ns / 8};
            return std::make_unique<TcpLane>(r.local, std::move(setup), r.board, rings);
          }
          PacedLane::Setup setup{thread, terms_.num_threads, segments, nic, terms_.disturbance, terms_.silence_ns};
          return std::make_unique<PacedLane>(r.local, std::move(setup), r.board, rings);
        });
    if (terms_.arena_bytes) {
      r.mailbox = std::make_unique<Mailbox>(*r.proxy, r.board, r.local, terms_.arena_bytes);
      r.proxy->start([&r] { r.mailbox->progress(); });
    } else {
      r.proxy->start();
    }
  }

  const Terms terms_;
  const int absent_;
  std::vector<std::vector<std::vector<int>>> sockets_;  // [thread][from][to]
};
