// Lane: one proxy thread's share of a transport, and the interface that every transport has. Only its thread calls it.
//
// The contract that a lane keeps: a posted word is visible only after the puts that its channel made to that peer
// before it. Nothing else has an order: the puts between two posts, and the channels.
#pragma once

#include <time.h>

#include <cstdint>
#include <vector>

#include "wire/board.h"
#include "wire/descriptor.h"

namespace eprt::wire {

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

class Lane {
 public:
  virtual ~Lane() = default;
  // Takes a request of a channel, and calls complete_next() of the channel's ring when it is done, in order. False
  // where there is no room: to be asked again after progress(). A request to a peer that has gone completes at once.
  virtual bool submit(int channel, const Request& request) = 0;
  // Moves what can be moved without waiting; whether anything did.
  virtual bool progress() = 0;
  // Nothing that was submitted is still under way.
  virtual bool is_idle() const = 0;
  // Until something arrives, something is due, wake_fd is readable or limit_ns have passed.
  virtual void sleep(int wake_fd, int64_t limit_ns) = 0;
  // The last call: tells the peers that nothing more comes. graceful: by decision, not by a failure.
  virtual void leave(bool graceful) = 0;
};

}  // namespace eprt::wire
