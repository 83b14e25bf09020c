// A wire between emulated GPUs that keeps the contract of wire.cuh and nothing else: bytes come in pieces, late and in
// any order, and are read from the sender only when they come; the word comes after them. A thread delivers, for all
// ranks of all groups of this process.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <queue>
#include <random>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct Heap {
  int group, rank;
  char* begin;
  uint64_t bytes;
};

struct Delivery {  // a piece, or where `word` is given, a word
  Clock::time_point when;
  char* to;
  const char* from;
  uint64_t bytes, value;
  std::atomic<uint64_t>* word;
  int group;
  bool operator<(const Delivery& other) const { return when > other.when; }  // the earliest first
};

std::mutex mutex;
std::condition_variable& changed = *new std::condition_variable;  // the thread waits there when the process ends
std::vector<Heap> heaps;
std::priority_queue<Delivery> under_way;
std::mt19937 draw(5);
int latest_us = 3000;
bool started = false;

void deliver() {
  std::unique_lock lock(mutex);
  for (;;) {
    if (under_way.empty()) {
      changed.wait(lock);
      continue;
    }
    const Delivery next = under_way.top();
    if (next.when > Clock::now()) {
      changed.wait_until(lock, next.when);
      continue;
    }
    under_way.pop();
    if (next.word)
      next.word->store(next.value, std::memory_order_release);
    else
      std::memcpy(next.to, next.from, next.bytes);
  }
}

const Heap* heap_of(const void* place) {
  for (const Heap& heap : heaps)
    if (place >= heap.begin && place < heap.begin + heap.bytes) return &heap;
  std::abort();  // not symmetric memory
}

char* at_peer(const void* place, int peer) {
  const Heap* own = heap_of(place);
  for (const Heap& heap : heaps)
    if (heap.group == own->group && heap.rank == peer)
      return heap.begin + (static_cast<const char*>(place) - own->begin);
  std::abort();  // no such rank
}

Clock::time_point soon(Clock::time_point earliest) {
  return earliest + std::chrono::microseconds(draw() % (latest_us + 1));
}

}  // namespace

extern "C" void wire_open(int group, int rank, void* begin, uint64_t bytes) {
  std::lock_guard lock(mutex);
  heaps.push_back({group, rank, static_cast<char*>(begin), bytes});
  if (!started) std::thread(deliver).detach();
  started = true;
}

// Nothing of the group is delivered any more.
extern "C" void wire_close(int group) {
  std::lock_guard lock(mutex);
  std::erase_if(heaps, [&](const Heap& heap) { return heap.group == group; });
  std::priority_queue<Delivery> others;
  for (; !under_way.empty(); under_way.pop())
    if (under_way.top().group != group) others.push(under_way.top());
  under_way.swap(others);
}

extern "C" void wire_delay(int us) { latest_us = us; }

extern "C" void emulated_put(void* to, const void* from, unsigned long long bytes, void* word, unsigned long long value,
                             int peer) {
  std::lock_guard lock(mutex);
  const int group = heap_of(word)->group;
  const Clock::time_point now = Clock::now();
  Clock::time_point last = now;
  for (uint64_t at = 0; at < bytes;) {
    const uint64_t size = std::min<uint64_t>(4 * (1 + draw() % 16), bytes - at);  // so words and lines are torn
    const Clock::time_point when = soon(now);
    under_way.push({when, at_peer(to, peer) + at, static_cast<const char*>(from) + at, size, 0, nullptr, group});
    last = std::max(last, when);
    at += size;
  }
  auto* there = reinterpret_cast<std::atomic<uint64_t>*>(at_peer(word, peer));
  under_way.push({soon(last) + std::chrono::nanoseconds(1), nullptr, nullptr, 0, value, there, group});
  changed.notify_one();
}
