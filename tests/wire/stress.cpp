// The proxy under ThreadSanitizer: `stress CASE`, exit status 0 when what the case says holds. test_proxy.py runs it.

#include <map>

#include "tests/wire/cluster.h"

namespace {

// ---- rings ----------------------------------------------------------------------------------------------------------

// One producer and one consumer: nothing is lost, repeated or out of order, though the ring is full and wraps often.
void ring() {
  for (const uint32_t capacity : {1u, 2u, 8u}) {
    std::vector<char> raw(DescriptorRing::num_bytes(capacity) + kLine);
    char* memory = raw.data() + (kLine - reinterpret_cast<uintptr_t>(raw.data()) % kLine) % kLine;
    DescriptorRing ring(memory, capacity);
    constexpr uint64_t kRequests = 20'000;
    uint64_t num_full = 0;
    std::thread producer([&] {
      for (uint64_t i = 0; i < kRequests; ++i) {
        const Request request{i % 3 ? Operation::kPut : Operation::kPost, int32_t(i % 70'000), i, ~i, uint32_t(i)};
        while (!ring.try_push(request)) {
          ++num_full;
          std::this_thread::yield();
        }
      }
      wait_for([&] { return ring.completed() == kRequests; }, "completion");
    });
    for (uint64_t i = 0; i < kRequests; ++i) {
      std::optional<Request> got;
      wait_for([&] { return (got = ring.front()).has_value(); }, "a request");
      CHECK(got->operation == (i % 3 ? Operation::kPut : Operation::kPost) && got->peer == int32_t(i % 70'000));
      CHECK(got->source == i && got->target == ~i && got->bytes == uint32_t(i));
      ring.pop();
      ring.complete_next();
    }
    producer.join();
    CHECK(!ring.front() && ring.is_idle());
    if (capacity == 1) CHECK(num_full > 0);
  }
}

// ---- the contract ---------------------------------------------------------------------------------------------------

constexpr int kPieces = 7;
constexpr uint64_t kPieceBytes = 40, kSets = 2;

uint64_t pattern(int from, int to, int channel, uint64_t epoch, int piece) {
  return ((epoch * 131 + piece) * 17 + channel) * 1009 + from * 31 + to;
}

// Every rank sends every other, on each channel, pieces of each epoch and a word; whoever sees the word must see all
// pieces of that epoch. An epoch's memory is used again two epochs later, once its reader has said that it is done.
void contract(const std::string& over, const Terms& given) {
  Terms terms = given;
  terms.arena_bytes = 0;
  const int n = terms.num_ranks, channels = terms.num_channels;
  const uint64_t epochs = 60;
  const auto place = [&](int from, int channel) { return uint64_t(from) * channels + channel; };
  terms.heap_bytes = n * channels * kSets * kPieces * kPieceBytes;
  terms.num_words = 2 * n * channels;  // the epoch that has come, the epoch that is read
  Cluster cluster(terms, over);
  cluster.run([&](Rank& rank) {
    const int me = rank.local.rank;
    std::vector<uint64_t> out(n * channels * kSets * kPieces * kPieceBytes / sizeof(uint64_t));
    for (uint64_t epoch = 1; epoch <= epochs; ++epoch) {
      for (int channel = 0; channel < channels; ++channel) {
        for (int peer = 0; peer < n; ++peer) {
          if (peer == me) continue;
          // The reader's word proves that the puts of two epochs ago have arrived, so their memory here is free, too.
          if (epoch > kSets) rank.wait_word(2 * place(peer, channel) + 1, epoch - kSets);
          for (int piece = 0; piece < kPieces; ++piece) {
            const uint64_t offset = (epoch % kSets * kPieces + piece) * kPieceBytes;
            uint64_t* from = &out[(place(peer, channel) * kSets * kPieces * kPieceBytes + offset) / sizeof(uint64_t)];
            for (uint64_t i = 0; i < kPieceBytes / sizeof(uint64_t); ++i)
              from[i] = pattern(me, peer, channel, epoch, piece) + i;
            rank.push(channel, {Operation::kPut, peer, reinterpret_cast<uint64_t>(from),
                                place(me, channel) * kSets * kPieces * kPieceBytes + offset, kPieceBytes});
          }
          rank.push(channel, {Operation::kPost, peer, epoch, 2 * place(me, channel), 0});
        }
      }
      for (int channel = 0; channel < channels; ++channel) {
        for (int peer = 0; peer < n; ++peer) {
          if (peer == me) continue;
          rank.wait_word(2 * place(peer, channel), epoch);
          for (int piece = 0; piece < kPieces; ++piece) {
            const uint64_t at = place(peer, channel) * kSets * kPieces + epoch % kSets * kPieces + piece;
            const auto* got = reinterpret_cast<const uint64_t*>(rank.local.heap + at * kPieceBytes);
            for (uint64_t i = 0; i < kPieceBytes / sizeof(uint64_t); ++i)
              CHECK(got[i] == pattern(peer, me, channel, epoch, piece) + i);
          }
          rank.push(channel, {Operation::kPost, peer, epoch, 2 * place(me, channel) + 1, 0});
        }
      }
    }
    for (int channel = 0; channel < channels; ++channel)
      wait_for([&] { return rank.proxy->completed(channel) == rank.proxy->pushed(channel); }, "completion");
  });
}

Terms disturbed() {
  Terms terms;
  terms.pace = {5.0, 3'000, 100};
  terms.disturbance = {7, 60'000, 0.2, 0.3, 150'000};
  return terms;
}

void small_rings(const std::string& over) {
  Terms terms = over == "paced" ? disturbed() : Terms{};
  terms.ring_capacity = 1;
  terms.num_channels = 1;
  terms.num_threads = 1;
  contract(over, terms);
}

// ---- messages -------------------------------------------------------------------------------------------------------

std::vector<char> payload(int from, int to, int64_t tag, int number, size_t bytes) {
  std::vector<char> data(bytes);
  std::mt19937 random(((from * 10 + to) * 10 + tag) * 1000 + number);
  for (char& c : data) c = static_cast<char>(random());
  return data;
}

// Sizes around the arena's, some receives posted before their message comes and some after, tags taken in another order
// than they were sent in.
void messages(const std::string& over, const Terms& terms) {
  Cluster cluster(terms, over);
  const std::vector<size_t> sizes = {0, 1, 15, 16, 17, 100, 4080, 4096, 4097, 9'000, 20'001, 3, 0, 8192};
  cluster.run([&](Rank& rank) {
    const int me = rank.local.rank, n = rank.local.num_ranks;
    struct Expected {
      int64_t id;
      std::vector<char> data, room;
    };
    std::vector<Expected> receives;
    std::vector<std::pair<int64_t, std::vector<char>>> sends;
    receives.reserve(2 * n * sizes.size());
    const auto expect = [&](int64_t tag) {
      for (int peer = 0; peer < n; ++peer) {
        if (peer == me) continue;
        for (size_t i = 0; i < sizes.size(); ++i) {
          std::vector<char> data = payload(peer, me, tag, int(i), sizes[i]);
          std::vector<char> room(data.size() + i % 3);
          char* at = room.data();
          receives.push_back({rank.mailbox->receive(peer, tag, at, room.size()), std::move(data), std::move(room)});
        }
      }
    };
    expect(2);
    for (const int64_t tag : {1, 2})
      for (size_t i = 0; i < sizes.size(); ++i)
        for (int peer = 0; peer < n; ++peer) {
          if (peer == me) continue;
          std::vector<char> data = payload(me, peer, tag, int(i), sizes[i]);
          const char* at = data.data();
          sends.emplace_back(rank.mailbox->send(peer, tag, at, data.size()), std::move(data));
        }
    expect(1);
    for (const auto& [id, data] : sends) wait_for([&, id = id] { return rank.is_done(id); }, "a send");
    for (Expected& each : receives) {
      wait_for([&] { return rank.is_done(each.id); }, "a message");
      CHECK(std::equal(each.data.begin(), each.data.end(), each.room.begin()));
    }
    CHECK(rank.is_done(sends[0].first));  // its number is void
  });
}

void short_room_and_cancel() {
  Cluster cluster({}, "tcp");
  Rank &a = *cluster.ranks[0], &b = *cluster.ranks[1];
  std::vector<char> data = payload(0, 1, 5, 0, 3000), room(3000, 'x');
  const int64_t cancelled = b.mailbox->receive(0, 6, room.data(), room.size());
  b.mailbox->cancel(cancelled);
  const int64_t tight = b.mailbox->receive(0, 5, room.data(), 2999);
  const int64_t sent = a.mailbox->send(1, 5, data.data(), data.size());
  CHECK(b.failure(tight) == "3000 bytes came for a buffer of 2999");
  const int64_t other = a.mailbox->send(1, 6, data.data(), data.size());
  const int64_t late = b.mailbox->receive(0, 6, room.data(), room.size());
  wait_for([&] { return b.is_done(late) && a.is_done(sent) && a.is_done(other); }, "messages");
  CHECK(room == data);
}

// ---- failures -------------------------------------------------------------------------------------------------------

// A proxy thread that ends: its own rank and its peers say whose it was. Others go on among themselves.
void killed_thread(const std::string& over) {
  Cluster cluster({}, over);
  char data[8] = "tokens!", room[8] = "";
  const int64_t at0 = cluster.ranks[0]->mailbox->receive(1, 1, room, sizeof room);
  const int64_t at1 = cluster.ranks[1]->mailbox->receive(2, 1, room, sizeof room);
  cluster.ranks[1]->proxy->end_thread(1);
  CHECK(cluster.ranks[0]->failure(at0) == "proxy thread 1 of rank 1 has ended");
  CHECK(cluster.ranks[1]->failure(at1) == "proxy thread 1 of rank 1 has ended: it was told to");
  const int64_t sent = cluster.ranks[0]->mailbox->send(2, 3, data, sizeof data);
  const int64_t received = cluster.ranks[2]->mailbox->receive(0, 3, room, sizeof room);
  wait_for([&] { return cluster.ranks[2]->is_done(received) && cluster.ranks[0]->is_done(sent); }, "the others");
  CHECK(std::memcmp(data, room, sizeof data) == 0);
  CHECK(cluster.ranks[0]->board.state(1) == PeerState::kLost);
}

// A rank that was there and says nothing: every thread of it is silent.
void silent_rank(const std::string& over) {
  Terms terms;
  terms.silence_ns = 300'000'000;
  terms.num_threads = 1;
  Cluster cluster(terms, over, 2);
  char room[8];
  const int64_t message = cluster.ranks[0]->mailbox->receive(2, 1, room, sizeof room);
  const std::string reason = cluster.ranks[0]->failure(message);
  CHECK(reason.find("proxy thread 0 of rank 2 has been silent for ") == 0);
}

// What a rank sent before it left arrives; after that the others know that it has left.
void left_rank(const std::string& over) {
  Cluster cluster({}, over);
  std::vector<char> data = payload(2, 0, 1, 0, 3000), room(3000);
  const int64_t sent = cluster.ranks[2]->mailbox->send(0, 1, data.data(), data.size());
  wait_for([&] { return cluster.ranks[2]->is_done(sent); }, "a send");
  cluster.ranks[2]->proxy->stop();
  wait_for([&] { return cluster.ranks[0]->board.state(2) != PeerState::kPresent; }, "news");
  CHECK(cluster.ranks[0]->board.state(2) == PeerState::kLeft);
  const int64_t received = cluster.ranks[0]->mailbox->receive(2, 1, room.data(), room.size());
  const int64_t never = cluster.ranks[0]->mailbox->receive(2, 1, room.data(), room.size());
  wait_for([&] { return cluster.ranks[0]->is_done(received); }, "the last message");
  CHECK(room == data);
  CHECK(cluster.ranks[0]->failure(never) == "rank 2 has left the group");
}

// A connection that ends without a goodbye, as when a process is killed, and one on which garbage comes.
void broken_connections() {
  Terms terms;
  terms.num_threads = 1;
  const auto frame = [](uint16_t kind, uint32_t bytes, uint32_t sequence, uint64_t target) {
    return Frame{Frame::kMagic, kind, 0, bytes, sequence, target, 1};
  };
  struct Case {
    Frame frame;
    const char* reason;
  };
  Frame no_frame = frame(Frame::kPut, 0, 0, 0);
  no_frame.magic = 1;
  for (const Case& each : {Case{no_frame, "rank 2 sent something that is no frame"},
                           Case{frame(Frame::kPost, 0, 3, 0), "rank 2 sent frame 3 in place of 0"},
                           Case{frame(Frame::kPut, 64, 0, 3 * 4096 - 63),
                                "rank 2 sent a put of 64 bytes at 12225, outside of a heap of 12288"},
                           Case{frame(Frame::kPost, 0, 0, 6), "rank 2 sent word 6 of 6"},
                           Case{frame(9, 0, 0, 0), "rank 2 sent a frame of unknown kind 9"},
                           Case{frame(0, 0, 0, 0), "rank 2 closed its connection"}}) {
    Cluster cluster(terms, "tcp", 2);
    const int socket = cluster.socket(0, 2, 0);
    if (each.frame.kind != 0) CHECK(write(socket, &each.frame, sizeof each.frame) == sizeof each.frame);
    if (each.frame.kind == 0) shutdown(socket, SHUT_RDWR);
    char room[8];
    const int64_t message = cluster.ranks[0]->mailbox->receive(2, 1, room, sizeof room);
    CHECK(cluster.ranks[0]->failure(message) == each.reason);
    for (uint64_t i = 0; i < cluster.ranks[0]->local.heap_bytes; ++i) CHECK(cluster.ranks[0]->local.heap[i] == 0);
  }
}

void refusals() {
  Terms terms;
  terms.num_threads = 1;
  Cluster cluster(terms, "tcp");
  Proxy& proxy = *cluster.ranks[0]->proxy;
  const auto refused = [&](int channel, const Request& request) {
    try {
      proxy.try_push(channel, request);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(refused(4, {Operation::kPost, 1, 1, 0, 0}) == "rank 0, channel 4: there are 4 channels");
  CHECK(refused(0, {Operation::kPost, 0, 1, 0, 0}) == "rank 0, channel 0: peer 0 is not another of 3 ranks");
  CHECK(refused(0, {Operation::kPost, 1, 1, 6, 0}) == "rank 0, channel 0: word 6: there are 6");
  CHECK(refused(0, {Operation::kPut, 1, 0, 12288, 1}) ==
        "rank 0, channel 0: a put of 1 bytes at 12288 does not fit into a heap of 12288");
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> cases = {
      {"ring", ring},
      {"contract_paced", [] { contract("paced", {}); }},
      {"contract_disturbed", [] { contract("paced", disturbed()); }},
      {"contract_tcp", [] { contract("tcp", {}); }},
      {"small_rings_paced", [] { small_rings("paced"); }},
      {"small_rings_tcp", [] { small_rings("tcp"); }},
      {"messages_disturbed", [] { messages("paced", disturbed()); }},
      {"messages_tcp", [] { messages("tcp", {}); }},
      {"short_room_and_cancel", short_room_and_cancel},
      {"killed_thread_paced", [] { killed_thread("paced"); }},
      {"killed_thread_tcp", [] { killed_thread("tcp"); }},
      {"silent_rank_paced", [] { silent_rank("paced"); }},
      {"silent_rank_tcp", [] { silent_rank("tcp"); }},
      {"left_rank_paced", [] { left_rank("paced"); }},
      {"left_rank_tcp", [] { left_rank("tcp"); }},
      {"broken_connections", broken_connections},
      {"refusals", refusals},
  };
  if (argc < 2) {
    for (const auto& [name, body] : cases) std::puts(name.c_str());
    return 0;
  }
  const auto found = cases.find(argv[1]);
  if (found == cases.end()) return 2;
  found->second();
  return 0;
}
