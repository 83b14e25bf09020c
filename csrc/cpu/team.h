// parallel_for: loops over the threads of this process, for kernels.
//
// Unlike an OpenMP team no thread is needed to finish a loop: threads claim indices one by one, and a loop ends with
// its last index. A thread that the operating system runs late finds nothing left to do, where a barrier would wait for
// it; beside other busy processes that is the difference between a small and a tenfold loss. A thread claims its own
// share of the indices first, so that the same indices of the next loop find their data in the same cache.
//
// Threads are started when a loop first wants them, stay, spin for a moment between loops and then sleep. A loop inside
// a loop, or beside another thread's, is run by its caller alone. OpenMP's threads run the loops unless
// use_own_threads() was called.
#pragma once

#include <cstdint>
#include <type_traits>

namespace eprt {

constexpr int kMaxTeam = 256;  // threads; more are not used

// Calls call(context, index, thread) for every index in 0..count - 1, on at most num_threads threads, whose numbers are
// below that. call must not throw.
void run_on_team(int64_t count, int num_threads, void (*call)(void* context, int64_t index, int thread), void* context);

// body(index, thread), or body(index).
template <class Body>
void parallel_for(int64_t count, int num_threads, Body&& body) {
  using Type = std::remove_reference_t<Body>;
  const auto call = [](void* context, int64_t index, int thread) {
    if constexpr (std::is_invocable_v<Type&, int64_t, int>) {
      (*static_cast<Type*>(context))(index, thread);
    } else {
      (*static_cast<Type*>(context))(index);
    }
  };
  if (count <= 0) return;
  if (count == 1 || num_threads <= 1) {
    for (int64_t i = 0; i < count; ++i) call(const_cast<void*>(static_cast<const void*>(&body)), i, 0);
    return;
  }
  run_on_team(count, num_threads, call, const_cast<void*>(static_cast<const void*>(&body)));
}

// Whether loops run on threads of our own: where OpenMP's, which torch uses, sleep between loops.
void use_own_threads(bool on);

// As many threads as the last loop that had several was given: for operators that are not told.
int last_team_size();

}  // namespace eprt
