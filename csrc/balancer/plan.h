// From load to placement, from scratch, for balance alone.
#pragma once

#include <vector>

#include "packing.h"
#include "problem.h"

namespace eprt::balancer {

constexpr double kCloseEnough = 1.0002;  // of a lower bound: what is left is not worth a search

// A layer cut into the parts that are planned by themselves: one, or one per node in the hierarchical policy.
struct Division {
  std::vector<std::vector<int>> experts;  // of each part, ascending
  int gpus_per_part;
  double bound;  // no placement under the policy has a smaller largest time (copies sharing evenly)
};

Division divide(const Problem& problem, int64_t layer);
// Node of each group, so that the busiest node is done earliest; nodes of equal make get equally many groups.
std::vector<int> groups_to_nodes(const Problem& problem, int64_t layer, double* best_time);

// The part made of these experts on the GPUs first_gpu .. first_gpu + num_gpus - 1.
Part make_part(const Problem& problem, int64_t layer, const std::vector<int>& experts, int first_gpu, int num_gpus);
// Writes a packing of make_part's part to the layer's slots, ascending inside a GPU unless told to keep its order.
void write_slots(const Packing& packing, const std::vector<int>& experts, int first_gpu, int64_t* slot_P,
                 bool sorted = true);
// The largest GPU time when each expert's load is split evenly over its slots.
double largest_even_time(const Problem& problem, int64_t layer, const int64_t* slot_P);

// One layer: slot_P receives the expert of each slot or kEmpty, weight_P the slot weights. Returns the lower bound.
double plan_layer(const Problem& problem, int64_t layer, int64_t* slot_P, double* weight_P);

// What EPLB would have placed: possibly several copies of an expert on one GPU.
std::vector<int64_t> eplb_slots(const Problem& problem, int64_t layer);
// The same freed of second copies on one GPU and improved. weight_P starts as EPLB's split, so that filling weights
// from there can only end lower than EPLB's largest time.
void plan_from_eplb(const Problem& problem, int64_t layer, const std::vector<int64_t>& eplb_P, double bound,
                    int64_t* slot_P, double* weight_P);
// Not with unequal GPUs, nor with coverage.
bool eplb_can_plan(const Problem& problem, int64_t layer);

}  // namespace eprt::balancer
