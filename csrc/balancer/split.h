// Splits one batch of one layer over the replicas of its experts. balancer/split.py explains the arguments.
#pragma once

#include <cstdint>

#include "weights.h"

namespace eprt::balancer {

// How many tokens each source GPU sends to each slot. The largest GPU time is close to the smallest possible; within
// that limit as many tokens as possible stay on their own GPU, then on their own node.
//
// count_SE, quota_SP: int64, S = num_gpus. source: if >= 0, only that row is written, to quota_SP[0 .. P-1]. exact: the
// smallest largest time by maximum flow, not by water-filling. slack: fraction by which locality may exceed that time.
void split_batch(const Replicas& replicas, const int64_t* count_SE, bool exact, double slack, int64_t source,
                 int64_t* quota_SP);

// Splits one source's tokens by the slot weights; leftover tokens go to the largest remainders.
void split_by_weight(const Replicas& replicas, const int64_t* count_E, int64_t source, int64_t* quota_P);

// Chooses a slot for each of the K choices of T tokens within the quota of their source; -1 stays -1. Returns -1 on
// success, else the first index that is not an expert or whose choices exceed the quota.
int64_t assign(const Replicas& replicas, int64_t num_tokens, int64_t num_choices, const int64_t* expert_idx_TK,
               const int64_t* quota_P, int64_t source, int64_t* slot_idx_TK);

}  // namespace eprt::balancer
