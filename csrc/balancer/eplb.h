// The placement of DeepSeek's EPLB (github.com/deepseek-ai/EPLB), bit for bit, with stable sorts.
#pragma once

#include <cstdint>
#include <vector>

namespace eprt::balancer {

// Mirrored by class CEplbShape in balancer/core.py.
struct EplbShape {
  int64_t num_experts;
  int64_t num_slots;
  int64_t num_groups;  // 1 unless num_nodes divides it
  int64_t num_nodes;
  int64_t num_gpus;
};

// Plans one layer. load_E is fp32, as in EPLB. slot_P receives the expert of each slot, replica_P the number of the
// replica among the expert's replicas.
void eplb_layer(const EplbShape& shape, const float* load_E, int64_t* slot_P, int64_t* replica_P);

}  // namespace eprt::balancer
