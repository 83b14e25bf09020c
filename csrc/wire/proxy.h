// Proxy: threads that take requests from rings, one ring per channel, and give them to a transport.
//
// A channel belongs to thread channel % num_threads. One thread at a time may push to a channel. Knows nothing of which
// transport carries the requests.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "wire/board.h"
#include "wire/descriptor.h"
#include "wire/lane.h"

namespace eprt::wire {

class Proxy {
 public:
  struct Options {
    int num_threads, num_channels;
    uint32_t ring_capacity;  // descriptors of a channel, a power of 2
    int64_t spin_ns;         // that an idle thread looks on before it sleeps
  };
  using MakeLane = std::function<std::unique_ptr<Lane>(int thread, std::vector<DescriptorRing>& rings)>;

  Proxy(const Options& options, const Endpoint& local, Board& board, const MakeLane& make_lane);
  ~Proxy() { stop(); }

  // after_progress: called on a proxy thread when something has moved, and now and then.
  void start(std::function<void()> after_progress = nullptr);
  // Sends what was pushed, as far as it can within patience_ns, and tells the peers that nothing more comes.
  void stop(int64_t patience_ns = 2'000'000'000);

  // False while the channel's ring is full. std::invalid_argument for a request that no peer could take.
  bool try_push(int channel, const Request& request);
  uint64_t pushed(int channel) const { return rings_[channel].pushed(); }
  // Requests of the channel up to this number are complete: what they put may be overwritten.
  uint64_t completed(int channel) const { return rings_[channel].completed(); }
  int num_channels() const { return static_cast<int>(rings_.size()); }

  // Fault injection: the thread ends as if by an error, with what it still had.
  void end_thread(int thread) { threads_[thread]->must_break.store(true); }

 private:
  struct Thread {
    std::unique_ptr<Lane> lane;
    std::vector<int> channels;
    int wake_fd;
    std::atomic<bool> sleeps{false}, must_break{false};
    std::thread runs;
  };
  struct FreeMemory {
    void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t{kLine}); }
  };

  void run(Thread& thread, int number);
  void loop(Thread& thread);
  bool take_requests(Thread& thread);
  bool is_idle(const Thread& thread) const;
  void sleep(Thread& thread);
  void wake(Thread& thread);

  const Options options_;
  const Endpoint local_;
  Board& board_;
  std::unique_ptr<char[], FreeMemory> memory_;
  std::vector<DescriptorRing> rings_;  // by channel
  std::vector<std::unique_ptr<Thread>> threads_;
  std::function<void()> after_progress_;
  std::atomic<bool> stops_{false};
  std::atomic<int64_t> stop_deadline_ns_{0};
  bool is_started_ = false;
};

}  // namespace eprt::wire
