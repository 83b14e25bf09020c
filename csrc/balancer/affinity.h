// Plans that reduce the traffic between nodes at nearly the balance of plans for balance alone.
#pragma once

#include <cstdint>

#include "problem.h"
#include "traffic.h"

namespace eprt::balancer {

// Plans one layer as plan_layer does, with the same outputs. The largest GPU time under the weights is at most
// (1 + allowance) times that of the plan for balance alone. Falls back to that plan if none with less traffic is found.
double plan_for_traffic(const Problem& problem, int64_t layer, const Tokens& tokens, Traffic traffic, double allowance,
                        int64_t* slot_P, double* weight_P);

// The nodes of each expert's copies, one bit each.
void node_masks(const Problem& problem, const int64_t* slot_P, uint64_t* mask_E);

}  // namespace eprt::balancer
