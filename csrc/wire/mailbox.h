// Mailbox: messages of any length with tags, made of puts and posts alone. What EPGroup's isend and irecv need.
//
// Each rank's heap has an arena per source, a ring of bytes. A sender puts a record (tag, length, payload) and posts
// how far it has come; the receiver takes bytes out and posts that back. Messages of a (peer, tag) arrive in their
// order. All methods may be called from any thread; proxy threads call progress(). Knows nothing of what messages mean.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "wire/proxy.h"

namespace eprt::wire {

class Mailbox {
 public:
  // Every rank has as many words and as large a heap. arena_bytes: a multiple of 64.
  static uint64_t num_words(int num_ranks) { return 2 * uint64_t(num_ranks); }
  static uint64_t heap_bytes(int num_ranks, uint64_t arena_bytes) { return num_ranks * arena_bytes; }

  Mailbox(Proxy& proxy, const Board& board, const Endpoint& local, uint64_t arena_bytes);

  // data stays untouched until the message is done.
  int64_t send(int peer, int64_t tag, const char* data, uint64_t bytes);
  // room: of `data`, at least the message's length.
  int64_t receive(int peer, int64_t tag, char* data, uint64_t room);
  // Whether the message is done; its number is then void. std::runtime_error where it can no longer finish.
  bool test(int64_t message);
  // Forgets a message; a receive's memory is not written any more.
  void cancel(int64_t message);
  void progress();

 private:
  struct Sending {
    int64_t id;
    uint64_t header[2];  // tag, bytes: put from here
    const char* data;
    uint64_t pushed = 0;        // bytes of header, payload and padding
    uint64_t last_request = 0;  // number of its last put on the channel
  };
  struct Receiving {
    int64_t id;
    char* data;
    uint64_t room;
    bool is_done = false;
    std::string error;
  };
  // A message that comes in: straight to its receive where that was posted before, else into `kept`.
  struct Arriving {
    int64_t tag;
    uint64_t bytes, filled = 0;
    std::shared_ptr<Receiving> receive;
    std::vector<char> kept;
    bool is_direct;
  };
  struct Peer {
    std::deque<std::unique_ptr<Sending>> sending;  // not done; the first ones may wait only for completion
    size_t num_pushed = 0;                         // of `sending`, wholly pushed
    uint64_t sent = 0, posted = 0;                 // bytes of the stream to it
    uint64_t taken = 0, credited = 0;              // bytes of the stream from it
    uint64_t header[2];
    std::shared_ptr<Arriving> arriving;                                   // the record that is being read
    std::map<int64_t, std::deque<std::shared_ptr<Receiving>>> awaited;    // by tag, no message yet
    std::map<int64_t, std::deque<std::shared_ptr<Arriving>>> unexpected;  // by tag, no receive yet
  };

  int channel_to(int peer) const { return peer % proxy_.num_channels(); }
  void send_stream(int peer);
  bool push_part(int peer, Sending& message);
  bool put(int peer, const void* data, uint64_t bytes);
  void drop_completed(int peer);
  void read_stream(int peer);
  void begin_arriving(Peer& from);
  void fill_arriving(int peer, Peer& from, uint64_t available);
  void finish_arriving(Peer& from);
  void hand_over(Arriving& message, Receiving& to);
  void progress_locked();
  void progress_once();
  std::string reason_gone(int peer) const;

  Proxy& proxy_;
  const Board& board_;
  const Endpoint local_;
  const uint64_t arena_bytes_;
  std::mutex mutex_;
  std::atomic<bool> was_missed_{false};
  std::vector<Peer> peers_;
  int64_t next_id_ = 1;
  std::unordered_map<int64_t, int> open_sends_;  // number -> peer
  struct OpenReceive {
    int peer;
    std::shared_ptr<Receiving> receive;
  };
  std::unordered_map<int64_t, OpenReceive> open_receives_;
};

}  // namespace eprt::wire
