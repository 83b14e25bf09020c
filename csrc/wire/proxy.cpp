#include "wire/proxy.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

namespace eprt::wire {
namespace {

constexpr int64_t kLongestSleepNs = 50'000'000;  // also how often a lane shows that it lives
constexpr int kRequestsAtOnce = 32;              // of one channel, so that none starves

}  // namespace

Proxy::Proxy(const Options& options, const Endpoint& local, Board& board, const MakeLane& make_lane)
    : options_(options), local_(local), board_(board) {
  const size_t ring_bytes = DescriptorRing::num_bytes(options.ring_capacity);
  memory_.reset(new (std::align_val_t{kLine}) char[ring_bytes * options.num_channels]);
  rings_.reserve(options.num_channels);
  for (int channel = 0; channel < options.num_channels; ++channel)
    rings_.emplace_back(memory_.get() + ring_bytes * channel, options.ring_capacity);
  for (int number = 0; number < options.num_threads; ++number) {
    Thread& thread = *threads_.emplace_back(new Thread);
    thread.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (thread.wake_fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    for (int channel = number; channel < options.num_channels; channel += options.num_threads)
      thread.channels.push_back(channel);
    thread.lane = make_lane(number, rings_);
  }
}

void Proxy::start(std::function<void()> after_progress) {
  after_progress_ = std::move(after_progress);
  is_started_ = true;
  for (size_t i = 0; i < threads_.size(); ++i)
    threads_[i]->runs = std::thread([this, i] { run(*threads_[i], static_cast<int>(i)); });
}

void Proxy::stop(int64_t patience_ns) {
  if (!is_started_) return;
  is_started_ = false;
  stop_deadline_ns_.store(now_ns() + patience_ns);
  stops_.store(true);
  for (const auto& thread : threads_) {
    const uint64_t one = 1;
    if (write(thread->wake_fd, &one, sizeof one) < 0) continue;  // it is awake
  }
  for (const auto& thread : threads_) {
    thread->runs.join();
    close(thread->wake_fd);
  }
}

bool Proxy::try_push(int channel, const Request& request) {
  const auto refuse = [&](const std::string& what) {
    throw std::invalid_argument("rank " + std::to_string(local_.rank) + ", channel " + std::to_string(channel) + ": " +
                                what);
  };
  if (channel < 0 || channel >= num_channels()) refuse("there are " + std::to_string(num_channels()) + " channels");
  if (request.peer < 0 || request.peer >= local_.num_ranks || request.peer == local_.rank)
    refuse("peer " + std::to_string(request.peer) + " is not another of " + std::to_string(local_.num_ranks) +
           " ranks");
  if (request.operation == Operation::kPut) {
    if (request.bytes > local_.heap_bytes || request.target > local_.heap_bytes - request.bytes)
      refuse("a put of " + std::to_string(request.bytes) + " bytes at " + std::to_string(request.target) +
             " does not fit into a heap of " + std::to_string(local_.heap_bytes));
  } else if (request.target >= local_.num_words) {
    refuse("word " + std::to_string(request.target) + ": there are " + std::to_string(local_.num_words));
  }
  if (!rings_[channel].try_push(request)) return false;
  wake(*threads_[channel % threads_.size()]);
  return true;
}

// A thread that goes to sleep says so before it looks at its rings for the last time, so either it sees the request or
// this sees that it sleeps.
void Proxy::wake(Thread& thread) {
  if (!thread.sleeps.exchange(false, std::memory_order_acq_rel)) return;
  const uint64_t one = 1;
  if (write(thread.wake_fd, &one, sizeof one) < 0) return;  // the counter is full: it is awake
}

void Proxy::sleep(Thread& thread) {
  thread.sleeps.exchange(true, std::memory_order_acq_rel);
  for (const int channel : thread.channels)
    if (rings_[channel].front()) return;
  if (stops_.load() || thread.must_break.load()) return;
  thread.lane->sleep(thread.wake_fd, kLongestSleepNs);
  thread.sleeps.store(false, std::memory_order_release);
  uint64_t count;
  if (read(thread.wake_fd, &count, sizeof count) < 0) return;  // nobody had woken it
}

void Proxy::run(Thread& thread, int number) {
  try {
    loop(thread);
    thread.lane->leave(true);
  } catch (const std::exception& error) {
    board_.break_proxy("proxy thread " + std::to_string(number) + " of rank " + std::to_string(local_.rank) +
                       " has ended: " + error.what());
    thread.lane->leave(false);
  }
}

void Proxy::loop(Thread& thread) {
  int64_t moved_ns = now_ns();
  while (true) {
    if (thread.must_break.load(std::memory_order_relaxed)) throw std::runtime_error("it was told to");
    bool moved = take_requests(thread);
    moved |= thread.lane->progress();
    if (moved) moved_ns = now_ns();
    const bool rests = !moved && now_ns() - moved_ns >= options_.spin_ns;
    if (after_progress_ && (moved || rests)) after_progress_();
    if (stops_.load(std::memory_order_acquire) && (is_idle(thread) || now_ns() > stop_deadline_ns_.load())) return;
    if (rests) sleep(thread);
  }
}

bool Proxy::take_requests(Thread& thread) {
  bool moved = false;
  for (const int channel : thread.channels) {
    DescriptorRing& ring = rings_[channel];
    for (int i = 0; i < kRequestsAtOnce; ++i) {
      const auto request = ring.front();
      if (!request || !thread.lane->submit(channel, *request)) break;
      ring.pop();
      moved = true;
    }
  }
  return moved;
}

bool Proxy::is_idle(const Thread& thread) const {
  for (const int channel : thread.channels)
    if (rings_[channel].front()) return false;
  return thread.lane->is_idle();
}

}  // namespace eprt::wire
