// Plans a placement from scratch, for balance alone.
#pragma once

#include <vector>

#include "packing.h"
#include "problem.h"

namespace eprt::balancer {

constexpr double kCloseEnough = 1.0002;  // a search stops at this multiple of a lower bound

// The parts of a layer that are planned independently: one, or one per node in the hierarchical policy.
struct Division {
  std::vector<std::vector<int>> experts;  // the experts of each part, ascending
  int gpus_per_part;
  double bound;  // lower bound of the largest GPU time under the policy when copies share evenly
};

Division divide(const Problem& problem, int64_t layer);
// The node of each group, chosen to minimise the largest node time. Equal nodes get equally many groups.
std::vector<int> groups_to_nodes(const Problem& problem, int64_t layer, double* best_time);

// The part of these experts on GPUs first_gpu .. first_gpu + num_gpus - 1.
Part make_part(const Problem& problem, int64_t layer, const std::vector<int>& experts, int first_gpu, int num_gpus);
Part whole_layer(const Problem& problem, int64_t layer);
// Writes a part's packing to the layer's slots. sorted: ascending inside each GPU; else in the packing's order.
void write_slots(const Packing& packing, const std::vector<int>& experts, int first_gpu, int64_t* slot_P,
                 bool sorted = true);
// The largest GPU time when each expert's load is split evenly over its slots.
double largest_even_time(const Problem& problem, int64_t layer, const int64_t* slot_P);

// Plans one layer. slot_P receives the expert of each slot or kEmpty, weight_P the slot weights. Returns the bound.
// The largest time never exceeds that of a planner by EPLB's policy. Under even shares a GPU may hold second copies
// where EPLB's placement does.
double plan_layer(const Problem& problem, int64_t layer, int64_t* slot_P, double* weight_P);

// EPLB's placement without second copies on one GPU, then improved down to target.
void improve_eplb(const Problem& problem, int64_t layer, const std::vector<int64_t>& eplb_P, double target,
                  int64_t* slot_P);
// The same; if it ends worse than EPLB's placement, that one with second copies joined. weight_P then receives EPLB's
// split as a start, so that the weights filled from there never exceed EPLB's largest time.
void plan_from_eplb(const Problem& problem, int64_t layer, const std::vector<int64_t>& eplb_P, double bound,
                    int64_t* slot_P, double* weight_P);
// Whether EPLB supports the problem: equal GPUs, all slots usable, no minimum number of copies.
bool eplb_can_plan(const Problem& problem, int64_t layer);

}  // namespace eprt::balancer
