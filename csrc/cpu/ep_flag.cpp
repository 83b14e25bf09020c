#include "cpu/ep_flag.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace eprt::ep {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the futex word is the low half of the epoch");

uint32_t* futex_word(Flag* flag) { return reinterpret_cast<uint32_t*>(&flag->epoch); }

// Not FUTEX_PRIVATE_FLAG: the waiters are other processes.
long futex_wait(Flag* flag, uint32_t seen, int64_t timeout_ns) {
  const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  return syscall(SYS_futex, futex_word(flag), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void futex_wake_all(Flag* flag) { syscall(SYS_futex, futex_word(flag), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A sleep and a wake-up cost some 10 us, so it pays to poll first. A rank with a core of its own may spin; a rank that
// shares its core yields it between polls, because the awaited rank may need this very core (one exchange of flags
// among 4 ranks on 2 cores: 31 us when sleeping at once, 38 us when spinning first, 21 us when yielding).
constexpr int64_t kSpinNs = 20'000;
constexpr int64_t kYieldNs = 5'000;

bool look_for_a_while(Flag* flag, uint64_t epoch, bool owns_core) {
  const int64_t end_ns = now_ns() + (owns_core ? kSpinNs : kYieldNs);
  do {
    if (owns_core) {
      for (int i = 0; i < 16; ++i) cpu_relax();
    } else {
      sched_yield();
    }
    if (flag->epoch.load(std::memory_order_acquire) >= epoch) return true;
  } while (now_ns() < end_ns);
  return false;
}

}  // namespace

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

bool sleep_until(int64_t ns, int64_t deadline_ns) {
  const int64_t until_ns = ns < deadline_ns ? ns : deadline_ns;
  const timespec until{until_ns / 1'000'000'000, until_ns % 1'000'000'000};
  if (now_ns() < until_ns) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
  return now_ns() >= ns;
}

// Lost wake-ups: the owner stores epoch then loads sleepers; the waiter adds to sleepers then loads epoch. All four are
// seq_cst, so at least one side sees the other: either the waiter finds the new epoch or the owner finds the sleeper.
// A wake between the waiter's load and its futex call is not lost either: the kernel compares the word with `seen`.
void publish(Flag* flag, uint64_t epoch) {
  flag->epoch.store(epoch, std::memory_order_seq_cst);
  if (flag->sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(flag);
}

bool wait_for(Flag* flag, uint64_t epoch, bool owns_core, int64_t deadline_ns) {
  if (flag->epoch.load(std::memory_order_acquire) >= epoch) return true;
  if (look_for_a_while(flag, epoch, owns_core)) return true;
  bool reached = false;
  flag->sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (true) {
    const uint64_t seen = flag->epoch.load(std::memory_order_seq_cst);
    reached = seen >= epoch;
    const int64_t left_ns = reached ? 0 : deadline_ns - now_ns();
    if (reached || left_ns <= 0) break;
    if (futex_wait(flag, static_cast<uint32_t>(seen), left_ns) == -1 && errno == EINTR) break;
  }
  flag->sleepers.fetch_sub(1, std::memory_order_relaxed);
  return reached;
}

}  // namespace eprt::ep
