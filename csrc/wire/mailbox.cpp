#include "wire/mailbox.h"

#include <algorithm>
#include <cstring>

namespace eprt::wire {
namespace {

constexpr uint64_t kHeader = 16, kAlign = 16;
constexpr uint64_t kMaxPut = 1 << 20;

uint64_t padded(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

Mailbox::Mailbox(Proxy& proxy, const Board& board, const Endpoint& local, uint64_t arena_bytes)
    : proxy_(proxy), board_(board), local_(local), arena_bytes_(arena_bytes), peers_(local.num_ranks) {
  if (arena_bytes == 0 || arena_bytes % kLine != 0)
    throw std::invalid_argument("an arena of " + std::to_string(arena_bytes) + " bytes: must be a multiple of 64");
}

int64_t Mailbox::send(int peer, int64_t tag, const char* data, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (peer < 0 || peer >= local_.num_ranks || peer == local_.rank)
    throw std::invalid_argument("a message to rank " + std::to_string(peer) + ": not another rank");
  const int64_t id = next_id_++;
  peers_[peer].sending.emplace_back(new Sending{id, {static_cast<uint64_t>(tag), bytes}, data});
  open_sends_[id] = peer;
  send_stream(peer);
  return id;
}

int64_t Mailbox::receive(int peer, int64_t tag, char* data, uint64_t room) {
  std::lock_guard lock(mutex_);
  if (peer < 0 || peer >= local_.num_ranks || peer == local_.rank)
    throw std::invalid_argument("a message from rank " + std::to_string(peer) + ": not another rank");
  Peer& from = peers_[peer];
  auto receive = std::make_shared<Receiving>(Receiving{next_id_++, data, room, false, {}});
  open_receives_[receive->id] = {peer, receive};
  const auto kept = from.unexpected.find(tag);
  if (kept == from.unexpected.end()) {
    from.awaited[tag].push_back(receive);
    return receive->id;
  }
  const std::shared_ptr<Arriving> message = kept->second.front();
  kept->second.pop_front();
  if (kept->second.empty()) from.unexpected.erase(kept);
  message->receive = receive;
  if (message->filled == message->bytes) hand_over(*message, *receive);
  return receive->id;
}

bool Mailbox::test(int64_t message) {
  std::lock_guard lock(mutex_);
  const auto sent = open_sends_.find(message);
  const auto received = open_receives_.find(message);
  if (sent == open_sends_.end() && received == open_receives_.end()) return true;
  // What is known before the words are read: of a peer that has gone by then, nothing more comes.
  const int peer = sent != open_sends_.end() ? sent->second : received->second.peer;
  const std::string gone = reason_gone(peer);
  progress_locked();
  if (received != open_receives_.end() && received->second.receive->is_done) {
    const std::shared_ptr<Receiving> receive = received->second.receive;
    open_receives_.erase(received);
    if (!receive->error.empty()) throw std::runtime_error(receive->error);
    return true;
  }
  if (received == open_receives_.end() && open_sends_.find(message) == open_sends_.end()) return true;
  if (!gone.empty()) throw std::runtime_error(gone);
  return false;
}

// Empty while the peer and this rank's own proxy are there.
std::string Mailbox::reason_gone(int peer) const {
  return board_.state(peer) == PeerState::kPresent ? board_.broken() : board_.reason(peer);
}

void Mailbox::cancel(int64_t message) {
  std::lock_guard lock(mutex_);
  const auto found = open_receives_.find(message);
  if (found == open_receives_.end()) return;
  const OpenReceive open = found->second;
  open_receives_.erase(found);
  Peer& from = peers_[open.peer];
  for (auto& [tag, awaited] : from.awaited) std::erase(awaited, open.receive);
  if (from.arriving && from.arriving->receive == open.receive) {
    // The rest goes nowhere, the bytes that came already with it.
    from.arriving->is_direct = false;
    from.arriving->kept.resize(from.arriving->bytes);
  }
  open.receive->is_done = true;
}

void Mailbox::progress() {
  // Whoever holds the lock makes progress, and once more if something came meanwhile.
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) {
    progress_locked();
  } else {
    was_missed_.store(true);
  }
}

void Mailbox::progress_locked() {
  do {
    progress_once();
  } while (was_missed_.exchange(false));
}

void Mailbox::progress_once() {
  for (int peer = 0; peer < local_.num_ranks; ++peer) {
    if (peer == local_.rank) continue;
    read_stream(peer);
    send_stream(peer);
    drop_completed(peer);
  }
}

// ---- sending --------------------------------------------------------------------------------------------------------

void Mailbox::send_stream(int peer) {
  Peer& to = peers_[peer];
  while (to.num_pushed < to.sending.size() && push_part(peer, *to.sending[to.num_pushed])) {
  }
  if (to.posted != to.sent &&
      proxy_.try_push(channel_to(peer), {Operation::kPost, peer, to.sent, 2 * uint64_t(local_.rank), 0}))
    to.posted = to.sent;
  if (to.taken - to.credited >= arena_bytes_ / 4 &&
      proxy_.try_push(channel_to(peer), {Operation::kPost, peer, to.taken, 2 * uint64_t(local_.rank) + 1, 0}))
    to.credited = to.taken;
}

// The next piece of a message. False where the ring or the peer's arena is full.
bool Mailbox::push_part(int peer, Sending& message) {
  Peer& to = peers_[peer];
  const uint64_t bytes = message.header[1], end = kHeader + bytes, total = kHeader + padded(bytes);
  const uint64_t room = arena_bytes_ - (to.sent - read_word(local_.words + 2 * peer + 1));
  uint64_t step;
  if (message.pushed < kHeader) {
    step = kHeader;  // arena_bytes_ is a multiple of it, so a header never wraps
    if (room < step || !put(peer, message.header, step)) return false;
  } else if (message.pushed < end) {
    const uint64_t until_wrap = arena_bytes_ - to.sent % arena_bytes_;
    step = std::min({end - message.pushed, room, until_wrap, kMaxPut});
    if (step == 0 || !put(peer, message.data + (message.pushed - kHeader), step)) return false;
  } else {
    step = total - message.pushed;
    if (room < step) return false;
  }
  message.last_request = proxy_.pushed(channel_to(peer));
  message.pushed += step;
  to.sent += step;
  if (message.pushed == total) ++to.num_pushed;
  return true;
}

bool Mailbox::put(int peer, const void* data, uint64_t bytes) {
  const uint64_t at = local_.rank * arena_bytes_ + peers_[peer].sent % arena_bytes_;
  return proxy_.try_push(channel_to(peer),
                         {Operation::kPut, peer, reinterpret_cast<uint64_t>(data), at, static_cast<uint32_t>(bytes)});
}

void Mailbox::drop_completed(int peer) {
  Peer& to = peers_[peer];
  const uint64_t completed = proxy_.completed(channel_to(peer));
  while (to.num_pushed > 0 && to.sending.front()->last_request <= completed) {
    open_sends_.erase(to.sending.front()->id);
    to.sending.pop_front();
    --to.num_pushed;
  }
}

// ---- receiving ------------------------------------------------------------------------------------------------------

void Mailbox::read_stream(int peer) {
  Peer& from = peers_[peer];
  while (true) {
    const uint64_t available = read_word(local_.words + 2 * peer) - from.taken;
    if (!from.arriving) {
      if (available < kHeader) return;
      std::memcpy(from.header, local_.heap + peer * arena_bytes_ + from.taken % arena_bytes_, kHeader);
      from.taken += kHeader;
      begin_arriving(from);
    } else if (available == 0) {
      return;
    } else {
      fill_arriving(peer, from, available);
    }
    if (from.arriving->filled == padded(from.arriving->bytes)) finish_arriving(from);
  }
}

void Mailbox::begin_arriving(Peer& from) {
  auto message = std::make_shared<Arriving>();
  message->tag = static_cast<int64_t>(from.header[0]);
  message->bytes = from.header[1];
  const auto awaited = from.awaited.find(message->tag);
  if (awaited != from.awaited.end() && !awaited->second.empty()) {
    message->receive = awaited->second.front();
    awaited->second.pop_front();
  } else {
    from.unexpected[message->tag].push_back(message);
  }
  message->is_direct = message->receive && message->receive->room >= message->bytes;
  if (!message->is_direct) message->kept.resize(message->bytes);
  from.arriving = message;
}

void Mailbox::fill_arriving(int peer, Peer& from, uint64_t available) {
  Arriving& message = *from.arriving;
  const uint64_t at = from.taken % arena_bytes_;
  uint64_t step = std::min({available, arena_bytes_ - at, padded(message.bytes) - message.filled});
  const uint64_t payload = message.filled < message.bytes ? std::min(step, message.bytes - message.filled) : 0;
  char* to = message.is_direct ? message.receive->data : message.kept.data();
  if (payload > 0) std::memcpy(to + message.filled, local_.heap + peer * arena_bytes_ + at, payload);
  message.filled += step;
  from.taken += step;
}

void Mailbox::finish_arriving(Peer& from) {
  const std::shared_ptr<Arriving> message = std::move(from.arriving);
  message->filled = message->bytes;
  if (!message->receive) return;
  if (message->is_direct) {
    message->receive->is_done = true;
  } else {
    hand_over(*message, *message->receive);
  }
}

void Mailbox::hand_over(Arriving& message, Receiving& to) {
  if (to.is_done) return;  // cancelled
  if (message.bytes > to.room) {
    to.error = std::to_string(message.bytes) + " bytes came for a buffer of " + std::to_string(to.room);
  } else {
    std::memcpy(to.data, message.kept.data(), message.bytes);
  }
  to.is_done = true;
}

}  // namespace eprt::wire
