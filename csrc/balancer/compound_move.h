// CompoundMove: a copy and an exchange together, for when no single move lowers the busiest GPU.
#pragma once

#include "placed_layer.h"

namespace eprt::balancer {

// `given` of the busiest GPU gets one more copy on `gpu`, replacing `taken`. That overloads one other GPU with a copy
// of `taken`, `raised`, so there `passed` is exchanged with `lighter` of the GPU `helper`.
struct CompoundMove {
  double peak = 0.0;  // largest time among the affected GPUs, afterwards
  int given = -1, taken = -1, gpu = -1;
  int raised = -1, passed = -1, lighter = -1, helper = -1;
  static constexpr int kCost = 3;  // slots that receive an expert
};

// The compound move with the smallest peak; given < 0 if none stays below the busiest GPU's time.
CompoundMove best_compound_move(const PlacedLayer& placed, int busiest);
void apply(PlacedLayer& placed, const CompoundMove& move);

}  // namespace eprt::balancer
