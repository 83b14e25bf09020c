// Flag: an epoch in shared memory, stored by its owner and awaited by the other processes of the node.
//
// publish(e) makes everything that the owner wrote before visible to any process that sees epoch e (release/acquire).
// Epochs only grow, so a flag is never cleared and a late reader cannot miss one.
#pragma once

#include <atomic>
#include <cstdint>

namespace eprt::ep {

// One cache line, so that waiting for one rank does not slow another one down. All zero bytes are a flag at epoch 0.
struct alignas(64) Flag {
  std::atomic<uint64_t> epoch;
  std::atomic<uint32_t> sleepers;  // waiters inside or about to enter the futex; publish() wakes only if there are any
};
static_assert(sizeof(Flag) == 64);
// Lock-free atomics are address-free: they work between processes that map the flag at different addresses.
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// CLOCK_MONOTONIC in nanoseconds: one clock for all processes of a host.
int64_t now_ns();
// Sleeps until `ns` or the deadline, whichever is earlier. True when `ns` has passed.
bool sleep_until(int64_t ns, int64_t deadline_ns);

void publish(Flag* flag, uint64_t epoch);

// True as soon as the epoch is reached; false when deadline_ns has passed or a signal has arrived (its handler must
// run). Polls for some microseconds, spinning if this rank owns_core, otherwise yielding the core; then sleeps in the
// kernel.
bool wait_for(Flag* flag, uint64_t epoch, bool owns_core, int64_t deadline_ns);

}  // namespace eprt::ep
