// PacedLane: puts and posts through memory that all ranks map, at the pace of a network card that is not there. For
// tests and for measurements on one host; it can also disturb what the contract leaves open.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "wire/lane.h"

namespace eprt::wire {

// The card of one rank, shared by its lanes. Only the sender's side has a limit.
struct Pace {
  double bytes_per_ns = 0;     // GB/s; 0: unlimited
  int64_t latency_ns = 0;      // from the last byte sent until it is visible
  int64_t per_request_ns = 0;  // that the card is busy with each request, beside its bytes
};

// What a network may do within the contract.
struct Disturbance {
  uint64_t seed = 0;
  int64_t reorder_ns = 0;   // each put is late by up to so much: puts overtake each other
  double delay_words = 0;   // share of the posts that are late by word_delay_ns
  double repeat_words = 0;  // share of the posts that are delivered once more, word_delay_ns later
  int64_t word_delay_ns = 0;
};

class PacedNic {
 public:
  explicit PacedNic(const Pace& pace) : pace_(pace) {}
  // When a request that is given to the card now is visible at the peer.
  int64_t due_ns(int64_t now, uint32_t bytes);

 private:
  const Pace pace_;
  std::atomic<int64_t> free_ns_{0};
};

// A rank's memory as all ranks map it: beats of its proxy threads | words | heap.
struct PacedSegment {
  PacedSegment(char* base, int num_threads, uint64_t num_words)
      : beats(reinterpret_cast<uint64_t*>(base)),
        words(reinterpret_cast<uint64_t*>(base + beats_bytes(num_threads))),
        heap(base + beats_bytes(num_threads) + words_bytes(num_words)) {}
  static size_t num_bytes(int num_threads, uint64_t num_words, uint64_t heap_bytes) {
    return beats_bytes(num_threads) + words_bytes(num_words) + heap_bytes;
  }

  uint64_t* beats;
  uint64_t* words;
  char* heap;

 private:
  static size_t beats_bytes(int num_threads) { return (num_threads * sizeof(uint64_t) + kLine - 1) / kLine * kLine; }
  static size_t words_bytes(uint64_t num_words) { return (num_words * sizeof(uint64_t) + kLine - 1) / kLine * kLine; }
};

class PacedLane : public Lane {
 public:
  struct Setup {
    int thread, num_threads;
    std::vector<char*> segments;  // of every rank; null for ranks that are not reached by this wire
    std::shared_ptr<PacedNic> nic;
    Disturbance disturbance;
    int64_t silence_ns;  // after which a peer whose proxy shows no sign counts as lost
  };

  PacedLane(const Endpoint& local, Setup setup, Board& board, std::vector<DescriptorRing>& rings);

  bool submit(int channel, const Request& request) override;
  bool progress() override;
  bool is_idle() const override { return num_flights_ == 0; }
  void sleep(int wake_fd, int64_t limit_ns) override;
  void leave(bool graceful) override;

 private:
  struct Flight {
    Request request;
    int64_t due_ns;
    bool is_done;
  };
  struct Peer {
    PacedSegment segment;
    uint64_t beat_seen;
    int64_t heard_ns;
  };
  struct Repeat {
    int64_t due_ns;
    uint64_t* word;
    uint64_t value;
  };

  bool deliver_channel(int channel, int64_t now);
  void deliver(Flight& flight, int64_t now);
  void look_after_peers(int64_t now);
  bool happens(double share);

  const Endpoint local_;
  const Setup setup_;
  Board& board_;
  std::vector<DescriptorRing>& rings_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<std::deque<Flight>> flights_;  // by channel, in the order of their requests
  std::vector<int> blocked_;                 // by peer: scratch of deliver_channel
  int blocked_round_ = 0;
  std::deque<Repeat> repeats_;
  size_t num_flights_ = 0;
  int64_t next_due_ns_ = 0, looked_ns_ = 0;
  std::mt19937_64 random_;
};

}  // namespace eprt::wire
