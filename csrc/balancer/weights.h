// Slot weights: the shares of each expert's load that its slots take, so that the largest GPU time is as small as the
// placement allows.
#pragma once

#include <cstdint>
#include <vector>

namespace eprt::balancer {

// Water-filling in sweeps over the replicated experts of one layer: each expert's load is poured anew onto its least
// busy GPUs. This is coordinate descent on the sum of load^2 / speed, which ends at its minimum over all splits, and
// with it at the smallest possible largest time. Stops at target, or when a sweep changes nothing worth having.
//
// slot_P: expert of each slot or -1. weight_P receives the weights (even where an expert has no load); the even split
// is the start and stays when it reaches target by itself; with keep_start the weights passed in are. No step raises
// the largest time, so it never ends above that of its start. Returns the largest time.
double fill_weights(const int64_t* slot_P, int64_t num_slots, int64_t num_experts, int64_t num_gpus,
                    const double* load_E, const double* speed_G, double target, bool keep_start, double* weight_P);

}  // namespace eprt::balancer
