// The step that is left where no single move lowers the busiest GPU any more.
#pragma once

#include "placed.h"

namespace eprt::balancer {

// `given` of the busiest GPU gets a copy more on `gpu`, in the place of `taken`. That raises one other GPU with a copy
// of `taken`, `raised`, too high: there `passed` changes places with `lighter` of the GPU `helper`.
struct Relay {
  double peak = 0.0;  // the largest time among the GPUs touched
  int given = -1, taken = -1, gpu = -1;
  int raised = -1, passed = -1, lighter = -1, helper = -1;
  static constexpr int kCost = 3;
};

// The one with the smallest peak; given < 0 when none stays below the busiest GPU's time.
Relay best_relay(const Placed& placed, int busiest);
void apply(Placed& placed, const Relay& relay);

}  // namespace eprt::balancer
