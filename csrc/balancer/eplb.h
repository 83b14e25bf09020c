// Placement exactly as DeepSeek's EPLB chooses it (github.com/deepseek-ai/EPLB), with its sorts made stable.
#pragma once

#include <cstdint>
#include <vector>

namespace eprt::balancer {

struct EplbShape {
  int64_t num_experts;
  int64_t num_slots;
  int64_t num_groups;  // 1 unless num_nodes divides it
  int64_t num_nodes;
  int64_t num_gpus;
};

// One layer. load_E in fp32, as EPLB computes. slot_P receives the expert of each slot, replica_P which of the expert's
// replicas it is.
void eplb_layer(const EplbShape& shape, const float* load_E, int64_t* slot_P, int64_t* replica_P);

}  // namespace eprt::balancer
