// TcpLane: puts and posts as frames over stream sockets that are connected already, one per peer and proxy thread.
//
// All frames of a socket arrive in their order, and a channel belongs to one thread, so the contract holds by itself.
// What a peer sends is checked before any of it is written. Knows nothing of addresses, names and keys.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "wire/lane.h"

namespace eprt::wire {

// Every host of a group has the same byte order: a magic number read the wrong way round is refused.
struct Frame {
  static constexpr uint32_t kMagic = 0x45505754;  // "EPWT"
  enum Kind : uint16_t { kPut = 1, kPost = 2, kBeat = 3, kBye = 4, kBroken = 5 };

  uint32_t magic;
  uint16_t kind, channel;
  uint32_t bytes;     // of the payload that follows
  uint32_t sequence;  // of the frame on its socket, from 0
  uint64_t target;    // put: first byte in the heap; post: number of the word
  uint64_t value;     // of a post
};
static_assert(sizeof(Frame) == 32);

// Requests of one channel that go to several peers end in any order; the ring counts those before which none is open.
class OpenRequests {
 public:
  uint64_t begin() {
    is_done_.push_back(false);
    return first_ + is_done_.size() - 1;
  }
  void finish(uint64_t request, DescriptorRing& ring) {
    is_done_[request - first_] = true;
    for (; !is_done_.empty() && is_done_.front(); ++first_) {
      is_done_.pop_front();
      ring.complete_next();
    }
  }

 private:
  uint64_t first_ = 0;
  std::deque<bool> is_done_;
};

class TcpLane : public Lane {
 public:
  struct Setup {
    int thread;
    std::vector<int> sockets;  // by peer, -1 where there is none; the lane closes them
    int64_t silence_ns;        // after which a peer that sends nothing counts as lost
    int64_t beat_ns;           // after so much silence of its own a lane sends a sign of life
  };

  TcpLane(const Endpoint& local, Setup setup, Board& board, std::vector<DescriptorRing>& rings);
  ~TcpLane() override;

  bool submit(int channel, const Request& request) override;
  bool progress() override;
  bool is_idle() const override { return num_unsent_ == 0; }
  void sleep(int wake_fd, int64_t limit_ns) override;
  void leave(bool graceful) override;

 private:
  struct Unsent {
    Frame frame;
    const char* payload;
    int channel;       // whose request it is; -1: none's
    uint64_t request;  // of OpenRequests
  };
  struct Connection {
    int socket;
    std::deque<Unsent> unsent;
    size_t first_sent = 0;  // bytes of unsent.front() that are sent
    uint32_t next_out = 0, next_in = 0;
    Frame incoming;
    size_t incoming_got = 0;  // bytes of `incoming` and its payload
    int64_t heard_ns, told_ns;
  };

  void enqueue(Connection& to, Frame::Kind kind, int channel, const Request& request);
  void finish(const Unsent& unsent);
  bool send_some(int peer, Connection& to);
  void drop_sent(Connection& to, size_t num_bytes);
  bool receive_some(int peer, Connection& from);
  bool receive_into(int peer, Connection& from, char* to, size_t wanted, bool& moved);
  bool accept_header(int peer, Connection& from);
  void accept_frame(int peer, Connection& from);
  void watch_silence(int peer, Connection& peer_connection, int64_t now);
  void lose(int peer, PeerState state, const std::string& reason);
  void drain_until_closed(int64_t deadline);

  const Endpoint local_;
  const Setup setup_;
  Board& board_;
  std::vector<DescriptorRing>& rings_;
  std::vector<OpenRequests> open_;                        // by channel
  std::vector<std::unique_ptr<Connection>> connections_;  // by peer; null where there is none, or no more
  size_t num_unsent_ = 0;                                 // of requests
};

}  // namespace eprt::wire
