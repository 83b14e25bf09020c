#include "wire/paced_lane.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace eprt::wire {
namespace {

constexpr size_t kMaxFlights = 256;                            // of one lane
constexpr int64_t kLookNs = 20'000'000;                        // between two looks at the peers' beats
constexpr uint64_t kLeft = ~uint64_t{0}, kBroken = kLeft - 1;  // in place of a beat
constexpr int64_t kLongestRestNs = 1'000'000;                  // what arrives wakes nobody
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

}  // namespace

int64_t PacedNic::due_ns(int64_t now, uint32_t bytes) {
  const int64_t busy_ns =
      pace_.per_request_ns + (pace_.bytes_per_ns > 0 ? static_cast<int64_t>(bytes / pace_.bytes_per_ns) : 0);
  int64_t free = free_ns_.load(std::memory_order_relaxed), sent;
  do {
    sent = std::max(now, free) + busy_ns;
  } while (!free_ns_.compare_exchange_weak(free, sent, std::memory_order_relaxed));
  return sent + pace_.latency_ns;
}

PacedLane::PacedLane(const Endpoint& local, Setup setup, Board& board, std::vector<DescriptorRing>& rings)
    : local_(local),
      setup_(std::move(setup)),
      board_(board),
      rings_(rings),
      peers_(local.num_ranks),
      flights_(rings.size()),
      blocked_(local.num_ranks, 0),
      random_(setup_.disturbance.seed * 1000003 + local.rank * 1009 + setup_.thread) {
  for (int rank = 0; rank < local.num_ranks; ++rank) {
    if (!setup_.segments[rank]) {
      board_.report(rank, PeerState::kLost, "rank " + std::to_string(rank) + " is not on this wire");
    } else {
      peers_[rank].reset(new Peer{{setup_.segments[rank], setup_.num_threads, local.num_words}, 0, now_ns()});
    }
  }
}

bool PacedLane::happens(double share) {
  return share > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < share;
}

bool PacedLane::submit(int channel, const Request& request) {
  if (num_flights_ >= kMaxFlights) return false;
  int64_t due = setup_.nic->due_ns(now_ns(), request.operation == Operation::kPut ? request.bytes : 0);
  const Disturbance& d = setup_.disturbance;
  if (request.operation == Operation::kPut && d.reorder_ns > 0) due += random_() % d.reorder_ns;
  if (request.operation == Operation::kPost && happens(d.delay_words)) due += d.word_delay_ns;
  flights_[channel].push_back({request, due, false});
  ++num_flights_;
  next_due_ns_ = std::min(next_due_ns_, due);
  return true;
}

bool PacedLane::progress() {
  const int64_t now = now_ns();
  std::atomic_ref<uint64_t> beat(peers_[local_.rank]->segment.beats[setup_.thread]);
  beat.store(beat.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (now - looked_ns_ > kLookNs) look_after_peers(now);
  bool moved = false;
  if (now >= next_due_ns_) {
    next_due_ns_ = kNever;
    for (size_t channel = 0; channel < flights_.size(); ++channel)
      if (!flights_[channel].empty()) moved |= deliver_channel(static_cast<int>(channel), now);
  }
  while (!repeats_.empty() && repeats_.front().due_ns <= now) {
    advance_word(repeats_.front().word, repeats_.front().value);
    repeats_.pop_front();
  }
  return moved;
}

// Puts as they come due; a post once all earlier requests to its peer are delivered.
bool PacedLane::deliver_channel(int channel, int64_t now) {
  auto& flights = flights_[channel];
  ++blocked_round_;
  bool moved = false;
  for (Flight& flight : flights) {
    if (flight.is_done) continue;
    int& blocked = blocked_[flight.request.peer];
    const bool waits_for_earlier = flight.request.operation == Operation::kPost && blocked == blocked_round_;
    if (flight.due_ns > now || waits_for_earlier) {
      if (flight.due_ns > now) next_due_ns_ = std::min(next_due_ns_, flight.due_ns);
      blocked = blocked_round_;
      continue;
    }
    deliver(flight, now);
    moved = true;
  }
  while (!flights.empty() && flights.front().is_done) {
    rings_[channel].complete_next();
    flights.pop_front();
    --num_flights_;
  }
  return moved;
}

void PacedLane::deliver(Flight& flight, int64_t now) {
  const Request& request = flight.request;
  flight.is_done = true;
  if (board_.state(request.peer) != PeerState::kPresent) return;
  const PacedSegment& to = peers_[request.peer]->segment;
  if (request.operation == Operation::kPut) {
    std::memcpy(to.heap + request.target, reinterpret_cast<const char*>(request.source), request.bytes);
    return;
  }
  advance_word(to.words + request.target, request.source);
  const Disturbance& d = setup_.disturbance;
  if (happens(d.repeat_words)) repeats_.push_back({now + d.word_delay_ns, to.words + request.target, request.source});
}

void PacedLane::look_after_peers(int64_t now) {
  looked_ns_ = now;
  for (int rank = 0; rank < local_.num_ranks; ++rank) {
    if (rank == local_.rank || !peers_[rank] || board_.state(rank) != PeerState::kPresent) continue;
    Peer& peer = *peers_[rank];
    const uint64_t beat = std::atomic_ref<uint64_t>(peer.segment.beats[setup_.thread]).load(std::memory_order_acquire);
    const std::string thread = "proxy thread " + std::to_string(setup_.thread) + " of rank " + std::to_string(rank);
    if (beat == kLeft) {
      board_.report(rank, PeerState::kLeft, "rank " + std::to_string(rank) + " has left the group");
    } else if (beat == kBroken) {
      board_.report(rank, PeerState::kLost, thread + " has ended");
    } else if (beat != peer.beat_seen) {
      peer.beat_seen = beat;
      peer.heard_ns = now;
    } else if (now - peer.heard_ns > setup_.silence_ns) {
      board_.report(rank, PeerState::kLost,
                    thread + " has been silent for " + std::to_string((now - peer.heard_ns) / 1'000'000) + " ms");
    }
  }
}

void PacedLane::sleep(int wake_fd, int64_t limit_ns) {
  int64_t wait_ns = std::min({limit_ns, kLongestRestNs, std::max<int64_t>(0, next_due_ns_ - now_ns())});
  if (wait_ns <= 0) return;
  pollfd wake{wake_fd, POLLIN, 0};
  const timespec timeout{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
  ppoll(&wake, 1, &timeout, nullptr);
}

void PacedLane::leave(bool graceful) {
  std::atomic_ref<uint64_t>(peers_[local_.rank]->segment.beats[setup_.thread])
      .store(graceful ? kLeft : kBroken, std::memory_order_release);
}

}  // namespace eprt::wire
