// How indices are claimed: a thread's share is one word, [number of the loop | next index | end]. A claim is a
// compare-and-swap of the whole word, so a thread that comes late cannot claim an index of another loop than the one it
// saw. What to call is read after a claim: a claimed index keeps its loop from ending, and so from being replaced.
#include "cpu/team.h"

#include <immintrin.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace eprt {
namespace {

constexpr int kIndexBits = 22;
constexpr uint64_t kIndexMask = (1u << kIndexBits) - 1;
constexpr int64_t kMostAtOnce = kIndexMask;      // indices of one loop; more are cut into several
constexpr std::chrono::microseconds kSpin(400);  // longer than Python takes between two loops of a step
constexpr int kPausesBetweenLooks = 32, kPausesBeforeYield = 4096;

struct alignas(64) Share {
  std::atomic<uint64_t> word{0};
};

uint64_t word_of(uint32_t loop, uint64_t next, uint64_t end) {
  return static_cast<uint64_t>(loop) << (2 * kIndexBits) | next << kIndexBits | end;
}
// The bits of a loop's number that a word has room for.
uint32_t short_number(uint32_t loop) { return loop & ((1u << (64 - 2 * kIndexBits)) - 1); }

// OpenMP's threads, which torch uses, spin for milliseconds after each of torch's loops unless they are told not to.
// Beside them a second team would only take turns with them: then they run the loops.
std::atomic<bool> g_own_threads{false};
bool runs_on_openmp() { return !g_own_threads.load(std::memory_order_relaxed); }

std::atomic<bool> g_forked{false};  // from a process that may have had threads of OpenMP, which here are not

class Team {
 public:
  // One loop. False where another one runs or none can: nothing was done.
  bool run(int64_t count, int num_threads, void (*call)(void*, int64_t, int), void* context) {
    if ((runs_on_openmp() && g_forked) || !busy_.try_lock()) return false;
    const std::lock_guard<std::mutex> lock(busy_, std::adopt_lock);
    call_.store(call, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    left_.store(count, std::memory_order_relaxed);
    size_.store(num_threads, std::memory_order_relaxed);
    const uint32_t loop = loop_.load(std::memory_order_relaxed) + 1;
    for (int t = 0; t < num_threads; ++t) {
      const uint64_t begin = count * t / num_threads, end = count * (t + 1) / num_threads;
      share_[t].word.store(word_of(short_number(loop), begin, end), std::memory_order_release);
    }
    if (runs_on_openmp()) {
#pragma omp parallel num_threads(num_threads)
      work(omp_get_thread_num(), loop);
      loop_.store(loop, std::memory_order_relaxed);
      return true;
    }
    start_threads(num_threads);
    loop_.store(loop, std::memory_order_release);
    loop_.notify_all();
    work(0, loop);
    const int most_pauses = spins() ? kPausesBeforeYield : 0;
    for (int pauses = 0; left_.load(std::memory_order_acquire) > 0; ++pauses) {
      pauses < most_pauses ? _mm_pause() : std::this_thread::yield();
    }
    return true;
  }

 private:
  // Where threads have to share cores, one that spins keeps another from its work.
  bool spins() const { return size_.load(std::memory_order_relaxed) <= num_cpus_; }

  static int num_cpus() {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? CPU_COUNT(&allowed) : kMaxTeam;
  }

  void start_threads(int num_threads) {
    for (; started_ < num_threads; ++started_) {
      std::thread([this, self = started_, seen = loop_.load()] { wait_and_work(self, seen); }).detach();
    }
  }

  void wait_and_work(int self, uint32_t seen) {
    for (;;) {
      seen = next_loop(seen);
      if (self < size_.load(std::memory_order_relaxed)) work(self, seen);
    }
  }

  // Waits until another loop than `seen` has begun; returns its number.
  uint32_t next_loop(uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < kPausesBetweenLooks; ++i) {
        const uint32_t loop = loop_.load(std::memory_order_acquire);
        if (loop != seen) return loop;
        _mm_pause();
      }
    } while (spins() && std::chrono::steady_clock::now() < until);
    loop_.wait(seen, std::memory_order_acquire);
    return loop_.load(std::memory_order_acquire);
  }

  // Calls for the thread's own indices, then for what others have not begun.
  void work(int self, uint32_t loop) {
    const int size = size_.load(std::memory_order_relaxed);
    int64_t done = 0, index = 0;
    for (int i = 0; i < size; ++i) {
      Share& share = share_[(self + i) % size];
      while (claim(share, loop, index)) {
        call_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), index, self);
        ++done;
      }
    }
    if (done > 0) left_.fetch_sub(done, std::memory_order_acq_rel);
  }

  static bool claim(Share& share, uint32_t loop, int64_t& index) {
    uint64_t word = share.word.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t next = word >> kIndexBits & kIndexMask;
      if (word >> (2 * kIndexBits) != short_number(loop) || next >= (word & kIndexMask)) return false;
      const uint64_t claimed = word + (uint64_t{1} << kIndexBits);
      if (share.word.compare_exchange_weak(word, claimed, std::memory_order_acq_rel)) {
        index = static_cast<int64_t>(next);
        return true;
      }
    }
  }

  std::mutex busy_;
  const int num_cpus_ = num_cpus();
  int started_ = 1;  // the caller is thread 0
  Share share_[kMaxTeam];
  alignas(64) std::atomic<uint32_t> loop_{0};  // number of the loop that runs or ran last
  std::atomic<int> size_{0};
  std::atomic<void (*)(void*, int64_t, int)> call_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(64) std::atomic<int64_t> left_{0};  // indices that have not been called for
};

std::atomic<Team*> g_team{nullptr};
std::atomic<int> g_last_size{1};
thread_local bool t_in_loop = false;

// A forked child has none of its parent's threads, so it makes a team of its own. OpenMP cannot: there it computes
// alone.
Team& team() {
  static const bool watched = pthread_atfork(nullptr, nullptr, [] {
                                g_team.store(nullptr);
                                g_forked.store(true);
                              }) == 0;
  static_cast<void>(watched);
  Team* found = g_team.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  Team* made = new Team();  // never destroyed: its threads wait in it until the process ends
  if (g_team.compare_exchange_strong(found, made)) return *made;
  delete made;
  return *found;
}

}  // namespace

void use_own_threads(bool on) { g_own_threads.store(on); }

int last_team_size() { return g_last_size.load(std::memory_order_relaxed); }

void run_on_team(int64_t count, int num_threads, void (*call)(void*, int64_t, int), void* context) {
  g_last_size.store(num_threads, std::memory_order_relaxed);
  // A smaller team would end threads of OpenMP, which the next loop starts anew: that takes a millisecond.
  const int most = std::min(num_threads, kMaxTeam);
  const int size = runs_on_openmp() ? most : static_cast<int>(std::min<int64_t>(most, count));
  if (count <= kMostAtOnce && !t_in_loop) {
    t_in_loop = true;
    const bool ran = team().run(count, size, call, context);
    t_in_loop = false;
    if (ran) return;
  }
  for (int64_t i = 0; i < count; ++i) call(context, i, 0);
}

}  // namespace eprt
