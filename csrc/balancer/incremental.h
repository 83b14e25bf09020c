// Improves the current placement by one move after another.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"
#include "traffic.h"

namespace eprt::balancer {

// A slot's new content. Changes of the same step belong together (an exchange has two). Repairs (step 0) restore what
// constraints or lost GPUs require and are not optional.
struct Change {
  enum Kind : int64_t { kRepair, kBalance, kTraffic };
  int64_t slot;
  int64_t expert;  // kEmpty: the slot is freed, no weights move
  int64_t step;
  Kind kind;
  // Of the step. kBalance: decrease of the layer's smooth maximum (the 16-norm of the GPU times, in units of load over
  // speed). kTraffic: crossings saved.
  double gain;
};

struct Budget {
  int64_t max_moves;  // slots that receive an expert, not counting repairs
  // The search stops when a move lowers the busiest GPU by less than this fraction of the mean, or saves fewer
  // crossings per token.
  double min_gain;
};

// Without tokens (null) the budget is for balance alone. With tokens it balances only until the largest GPU time is
// within the allowance of what balance alone would reach; the rest of the budget saves traffic within the allowance.
std::vector<Change> improve_placement(const Problem& problem, int64_t layer, const int64_t* current_P,
                                      const Budget& budget, const Tokens* tokens, Traffic traffic, double allowance);

}  // namespace eprt::balancer
