// One batch of one layer over the replicas of its experts. See balancer/split.py for what the numbers mean.
#pragma once

#include <cstdint>

#include "weights.h"

namespace eprt::balancer {

// Tokens that each source GPU sends to each slot: the largest GPU time close to the smallest possible, and under that
// as many tokens as possible on their own GPU, then on their own node. count_SE, quota_SP: int64, S = num_gpus; with
// source >= 0 only that row is written, to quota_SP[0 .. P-1]. exact: the smallest largest load by maximum flow instead
// of water-filling. slack: fraction above it that locality may cost.
void split_batch(const Replicas& replicas, const int64_t* count_SE, bool exact, double slack, int64_t source,
                 int64_t* quota_SP);

// One source's tokens by the slots' weights, largest remainders first.
void split_by_weight(const Replicas& replicas, const int64_t* count_E, int64_t source, int64_t* quota_P);

// Slots for T tokens with K choices each, by the quota of their source; -1 stays -1. Returns -1, or the first expert
// that is no expert or has more choices than quota.
int64_t assign(const Replicas& replicas, int64_t num_tokens, int64_t num_choices, const int64_t* expert_idx_TK,
               const int64_t* quota_P, int64_t source, int64_t* slot_idx_TK);

}  // namespace eprt::balancer
