// Plans that reduce the traffic between nodes at nearly the balance of plans for balance alone.
#pragma once

#include <cstdint>

#include "problem.h"
#include "traffic.h"

namespace eprt::balancer {

struct AffinityResult {
  double bound;           // as plan_layer returns it
  double traffic_before;  // crossings of the tokens under the plan for balance alone
  double traffic;         // crossings under the plan returned
};

// Plans one layer; writes slot_P and weight_P as plan_layer does. The largest GPU time under the weights is at most
// (1 + allowance) times that of the plan for balance alone. Falls back to that plan if none with less traffic is found.
AffinityResult plan_for_traffic(const Problem& problem, int64_t layer, const Tokens& tokens, Traffic traffic,
                                double allowance, int64_t* slot_P, double* weight_P);

// The nodes of each expert's copies, one bit each.
void node_masks(const Problem& problem, const int64_t* slot_P, uint64_t* mask_E);
// The largest GPU time under these weights.
double largest_time(const Problem& problem, int64_t layer, const int64_t* slot_P, const double* weight_P);

}  // namespace eprt::balancer
