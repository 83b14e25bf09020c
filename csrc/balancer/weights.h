// How the load of replicated experts is shared out, so that the largest GPU time is as small as the placement allows.
#pragma once

#include <cstdint>

namespace eprt::balancer {

// The slots of each expert in one layer: slot_by_expert[first_E1[e]] .. slot_by_expert[first_E1[e + 1] - 1], ascending.
// GPU of slot s is s / (num_slots / num_gpus).
struct Replicas {
  int64_t num_experts;
  int64_t num_slots;
  int64_t num_gpus;
  int64_t num_nodes;
  const int64_t* first_E1;
  const int64_t* slot_by_expert;
  const double* weight_P;
  const double* speed_G;  // 0: masked, takes nothing of an expert that has another slot

  int64_t count(int64_t expert) const { return first_E1[expert + 1] - first_E1[expert]; }
  int64_t gpu(int64_t slot) const { return slot / (num_slots / num_gpus); }
  int64_t node(int64_t gpu) const { return gpu / (num_gpus / num_nodes); }
};

// Water-filling in sweeps over the replicated experts: each expert's load is poured anew onto its least busy GPUs.
// This is coordinate descent on the sum of load^2 / speed, which ends at its minimum over all splits, and with it at
// the smallest possible largest time; no step raises the largest time. Stops at target, after max_sweeps, or when a
// sweep changes nothing worth having.
//
// load_P: in, a split to start from; out, the split found. Returns the largest time.
double level_out(const Replicas& replicas, const double* load_E, double target, int max_sweeps, double* load_P);

// Slot weights of one layer. slot_P: expert of each slot or -1. weight_P receives the weights (even ones where an
// expert has no load). The start is the even split, or with keep_start the weights passed in. Returns the largest time.
double fill_weights(const int64_t* slot_P, int64_t num_slots, int64_t num_experts, int64_t num_gpus,
                    const double* load_E, const double* speed_G, double target, bool keep_start, double* weight_P);

}  // namespace eprt::balancer
