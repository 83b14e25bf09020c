// From the placement in force to a better one, one move after another.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"
#include "traffic.h"

namespace eprt::balancer {

// One slot's new content. Changes with the same step belong together (an exchange has two). Repairs (step 0) are what
// constraints or lost GPUs made necessary and are not optional. gain: by how much the step lowers the layer's smooth
// maximum (the 16-norm of the GPU times, in units of load over speed), or how many crossings of the tokens it saves.
struct Change {
  enum Kind : int64_t { kRepair, kBalance, kTraffic };
  int64_t slot;
  int64_t expert;  // kEmpty: given up, nothing moves
  int64_t step;
  Kind kind;
  double gain;
};

struct Budget {
  int64_t max_moves;  // slots that receive an expert, repairs not counted
  // Stop when a move lowers the busiest GPU by less than this fraction of the mean, or crossings by less per token.
  double min_gain;
};

std::vector<Change> improve_placement(const Problem& problem, int64_t layer, const int64_t* current_P,
                                      const Budget& budget);

// The same until the largest GPU time is within the allowance of what balance alone would reach with this budget; what
// is left of the budget saves traffic without leaving the allowance.
std::vector<Change> improve_traffic(const Problem& problem, int64_t layer, const int64_t* current_P,
                                    const Budget& budget, const Tokens& tokens, Traffic traffic, double allowance);

}  // namespace eprt::balancer
