#include "wire/tcp_lane.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace eprt::wire {
namespace {

constexpr size_t kMaxUnsent = 64;              // frames of one connection
constexpr int kMaxParts = 32;                  // of one sendmsg
constexpr size_t kMaxReceive = 4 << 20;        // bytes of one connection in one round, so that none starves
constexpr int64_t kGoodbyeNs = 1'000'000'000;  // for the last frames of a lane that leaves

std::string name_of(int peer) { return "rank " + std::to_string(peer); }

}  // namespace

TcpLane::TcpLane(const Endpoint& local, Setup setup, Board& board, std::vector<DescriptorRing>& rings)
    : local_(local),
      setup_(std::move(setup)),
      board_(board),
      rings_(rings),
      open_(rings.size()),
      connections_(local.num_ranks) {
  for (int peer = 0; peer < local.num_ranks; ++peer) {
    const int socket = setup_.sockets[peer];
    if (socket < 0) {
      board_.report(peer, PeerState::kLost, name_of(peer) + " is not on this wire");
      continue;
    }
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    connections_[peer] = std::make_unique<Connection>();
    connections_[peer]->socket = socket;
    connections_[peer]->heard_ns = connections_[peer]->told_ns = now_ns();
  }
}

TcpLane::~TcpLane() {
  for (const int socket : setup_.sockets)
    if (socket >= 0) close(socket);
}

// ---- sending --------------------------------------------------------------------------------------------------------

bool TcpLane::submit(int channel, const Request& request) {
  if (!connections_[request.peer]) {
    open_[channel].finish(open_[channel].begin(), rings_[channel]);
    return true;
  }
  Connection& to = *connections_[request.peer];
  if (to.unsent.size() >= kMaxUnsent) return false;
  enqueue(to, request.operation == Operation::kPut ? Frame::kPut : Frame::kPost, channel, request);
  ++num_unsent_;
  return true;
}

void TcpLane::enqueue(Connection& to, Frame::Kind kind, int channel, const Request& request) {
  const bool is_put = kind == Frame::kPut;
  const Frame frame{Frame::kMagic, kind,           static_cast<uint16_t>(channel), is_put ? request.bytes : 0,
                    to.next_out++, request.target, is_put ? 0 : request.source};
  to.unsent.push_back({frame, is_put ? reinterpret_cast<const char*>(request.source) : nullptr, channel,
                       channel < 0 ? 0 : open_[channel].begin()});
}

void TcpLane::finish(const Unsent& unsent) {
  if (unsent.channel < 0) return;
  open_[unsent.channel].finish(unsent.request, rings_[unsent.channel]);
  --num_unsent_;
}

bool TcpLane::send_some(int peer, Connection& to) {
  bool moved = false;
  while (!to.unsent.empty()) {
    iovec parts[kMaxParts];
    int num_parts = 0;
    size_t skip = to.first_sent;
    for (auto it = to.unsent.begin(); it != to.unsent.end() && num_parts + 2 <= kMaxParts; ++it) {
      if (skip < sizeof(Frame)) {
        parts[num_parts++] = {reinterpret_cast<char*>(&it->frame) + skip, sizeof(Frame) - skip};
        skip = 0;
      } else {
        skip -= sizeof(Frame);
      }
      if (it->frame.bytes > skip) parts[num_parts++] = {const_cast<char*>(it->payload) + skip, it->frame.bytes - skip};
      skip = 0;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = num_parts;
    const ssize_t sent = sendmsg(to.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      // What the peer has sent before it went may say why: the end of file that follows decides.
      if (errno != EPIPE && errno != ECONNRESET)
        lose(peer, PeerState::kLost, "sending to " + name_of(peer) + " failed: " + std::strerror(errno));
      break;
    }
    drop_sent(to, sent);
    moved = true;
  }
  return moved;
}

void TcpLane::drop_sent(Connection& to, size_t num_bytes) {
  to.told_ns = now_ns();
  to.first_sent += num_bytes;
  while (!to.unsent.empty() && to.first_sent >= sizeof(Frame) + to.unsent.front().frame.bytes) {
    const Unsent& done = to.unsent.front();
    to.first_sent -= sizeof(Frame) + done.frame.bytes;
    finish(done);
    to.unsent.pop_front();
  }
}

// ---- receiving ------------------------------------------------------------------------------------------------------

bool TcpLane::receive_some(int peer, Connection& from) {
  bool moved = false;
  size_t received = 0;
  while (received < kMaxReceive && connections_[peer]) {
    if (from.incoming_got < sizeof(Frame)) {
      char* header = reinterpret_cast<char*>(&from.incoming);
      if (!receive_into(peer, from, header + from.incoming_got, sizeof(Frame) - from.incoming_got, moved)) break;
      if (from.incoming_got < sizeof(Frame)) continue;
      if (!accept_header(peer, from)) break;
    }
    const size_t wanted = sizeof(Frame) + from.incoming.bytes - from.incoming_got;
    if (wanted > 0) {
      char* to = local_.heap + from.incoming.target + (from.incoming_got - sizeof(Frame));
      const size_t before = from.incoming_got;
      if (!receive_into(peer, from, to, wanted, moved)) break;
      received += from.incoming_got - before;
    }
    if (from.incoming_got == sizeof(Frame) + from.incoming.bytes) accept_frame(peer, from);
  }
  return moved;
}

// False where nothing has come, or nothing will.
bool TcpLane::receive_into(int peer, Connection& from, char* to, size_t wanted, bool& moved) {
  const ssize_t got = recv(from.socket, to, wanted, MSG_DONTWAIT);
  if (got > 0) {
    from.incoming_got += got;
    from.heard_ns = now_ns();
    moved = true;
    return true;
  }
  if (got < 0 && errno == EINTR) return true;
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
  const std::string how = got == 0 ? "closed its connection" : std::string("lost its connection: ") + strerror(errno);
  lose(peer, PeerState::kDied, name_of(peer) + " " + how);
  return false;
}

// Checks everything before any of the payload is written.
bool TcpLane::accept_header(int peer, Connection& from) {
  const Frame& frame = from.incoming;
  std::string wrong;
  if (frame.magic != Frame::kMagic) {
    wrong = "something that is no frame";
  } else if (frame.sequence != from.next_in) {
    wrong = "frame " + std::to_string(frame.sequence) + " in place of " + std::to_string(from.next_in);
  } else if (frame.kind == Frame::kPut) {
    if (frame.bytes > local_.heap_bytes || frame.target > local_.heap_bytes - frame.bytes)
      wrong = "a put of " + std::to_string(frame.bytes) + " bytes at " + std::to_string(frame.target) +
              ", outside of a heap of " + std::to_string(local_.heap_bytes);
  } else if (frame.kind < Frame::kPost || frame.kind > Frame::kBroken || frame.bytes != 0) {
    wrong = "a frame of unknown kind " + std::to_string(frame.kind);
  } else if (frame.kind == Frame::kPost && frame.target >= local_.num_words) {
    wrong = "word " + std::to_string(frame.target) + " of " + std::to_string(local_.num_words);
  }
  if (wrong.empty()) return true;
  lose(peer, PeerState::kLost, name_of(peer) + " sent " + wrong);
  return false;
}

void TcpLane::accept_frame(int peer, Connection& from) {
  const Frame frame = from.incoming;
  from.incoming_got = 0;
  ++from.next_in;
  if (frame.kind == Frame::kPost) {
    advance_word(local_.words + frame.target, frame.value);
  } else if (frame.kind == Frame::kBye) {
    lose(peer, PeerState::kLeft, name_of(peer) + " has left the group");
  } else if (frame.kind == Frame::kBroken) {
    lose(peer, PeerState::kLost,
         "proxy thread " + std::to_string(setup_.thread) + " of " + name_of(peer) + " has ended");
  }
}

// ---- both -----------------------------------------------------------------------------------------------------------

bool TcpLane::progress() {
  bool moved = false;
  const int64_t now = now_ns();
  for (int peer = 0; peer < local_.num_ranks; ++peer) {
    if (connections_[peer]) moved |= receive_some(peer, *connections_[peer]);
    if (connections_[peer]) moved |= send_some(peer, *connections_[peer]);
    if (connections_[peer]) watch_silence(peer, *connections_[peer], now);
  }
  return moved;
}

void TcpLane::watch_silence(int peer, Connection& peer_connection, int64_t now) {
  if (now - peer_connection.told_ns > setup_.beat_ns && peer_connection.unsent.empty()) {
    enqueue(peer_connection, Frame::kBeat, -1, {});
    peer_connection.told_ns = now;
  }
  if (now - peer_connection.heard_ns > setup_.silence_ns)
    lose(peer, PeerState::kLost,
         "proxy thread " + std::to_string(setup_.thread) + " of " + name_of(peer) + " has been silent for " +
             std::to_string((now - peer_connection.heard_ns) / 1'000'000) + " ms");
}

// What was still to be sent there is given up, and complete.
void TcpLane::lose(int peer, PeerState state, const std::string& reason) {
  board_.report(peer, state, reason);
  const std::unique_ptr<Connection> gone = std::move(connections_[peer]);
  for (const Unsent& unsent : gone->unsent) finish(unsent);
  shutdown(gone->socket, SHUT_RDWR);
}

void TcpLane::sleep(int wake_fd, int64_t limit_ns) {
  std::vector<pollfd> fds{{wake_fd, POLLIN, 0}};
  for (const auto& connection : connections_)
    if (connection)
      fds.push_back(
          {connection->socket, static_cast<short>(connection->unsent.empty() ? POLLIN : POLLIN | POLLOUT), 0});
  const timespec timeout{limit_ns / 1'000'000'000, limit_ns % 1'000'000'000};
  ppoll(fds.data(), fds.size(), &timeout, nullptr);
}

void TcpLane::leave(bool graceful) {
  const int64_t deadline = now_ns() + kGoodbyeNs;
  for (int peer = 0; peer < local_.num_ranks; ++peer) {
    if (!connections_[peer]) continue;
    enqueue(*connections_[peer], graceful ? Frame::kBye : Frame::kBroken, -1, {});
    while (connections_[peer] && !connections_[peer]->unsent.empty() && now_ns() < deadline) {
      if (send_some(peer, *connections_[peer]) || !connections_[peer]) continue;
      pollfd writable{connections_[peer]->socket, POLLOUT, 0};
      poll(&writable, 1, 20);
      if (writable.revents & (POLLERR | POLLHUP)) break;
    }
    if (connections_[peer]) shutdown(connections_[peer]->socket, SHUT_WR);
  }
  if (graceful) drain_until_closed(deadline);
}

// A socket that is closed with bytes unread resets the connection, and the peer may lose the goodbye.
void TcpLane::drain_until_closed(int64_t deadline) {
  for (const auto& connection : connections_) {
    char unread[4096];
    while (connection && now_ns() < deadline) {
      const ssize_t got = recv(connection->socket, unread, sizeof unread, MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) break;
      pollfd readable{connection->socket, POLLIN, 0};
      if (got < 0) poll(&readable, 1, 20);
    }
  }
}

}  // namespace eprt::wire
