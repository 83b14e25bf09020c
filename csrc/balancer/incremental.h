// From the placement in force to a better one, one move after another.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"

namespace eprt::balancer {

// One slot's new content. Changes with the same step belong together (an exchange has two). Step 0 repairs what
// constraints or lost GPUs made necessary and is not optional. gain: by how much the step lowers the layer's smooth
// maximum (the 16-norm of the GPU times), in units of load over speed; 0 in step 0.
struct Change {
  int64_t slot;
  int64_t expert;  // kEmpty: given up, nothing moves
  int64_t step;
  double gain;
};

struct Budget {
  int64_t max_moves;  // slots that receive an expert, repairs not counted
  double min_gain;    // stop when a move lowers the busiest GPU by less than this fraction of the mean
};

std::vector<Change> improve_placement(const Problem& problem, int64_t layer, const int64_t* current_P,
                                      const Budget& budget);

}  // namespace eprt::balancer
