// The policy of DeepSeek's EPLB (github.com/deepseek-ai/EPLB), which SGLang, vLLM and RTP-LLM plan by, too.
//
// Groups go to nodes, the heaviest first; in each node slot after slot goes to the expert with the largest load per
// copy; the copies go to GPUs, the heaviest first. DeepSeek's code and SGLang's add in fp32 (torch), vLLM's in fp64
// (numpy) from loads in fp32. Number is what is added in.
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

// Plans one layer as DeepSeek's code does, bit for bit, with stable sorts. load_E is fp32, as there. slot_P receives
// the expert of each slot, replica_P the number of the replica among the expert's replicas.
void eplb_layer(const EplbShape& shape, const float* load_E, int64_t* slot_P, int64_t* replica_P);

// The load of each group, with the rounding of torch's sum.
std::vector<float> eplb_group_loads(const EplbShape& shape, const float* load_E);

// The copies of a node's experts, numbered from 0 in the order in which ties go to the earlier one.
struct EplbCopies {
  std::vector<int> expert_P, replica_P;  // of each slot: first each expert once, then what was added, in that order
  std::vector<int> count_E;
};

template <typename Number>
EplbCopies eplb_copies(const std::vector<Number>& load_E, int num_slots);
// Whether the policy gives as many copies to each expert in this precision as it gave in another.
template <typename Number>
bool eplb_copies_hold(const std::vector<Number>& load_E, const EplbCopies& copies);

struct EplbPacks {
  std::vector<int> pack_N, rank_N;  // the pack of each item, and its position there
  std::vector<int> order;           // the items as they were packed
};

// Packs the copies onto GPUs. If packs.order is not empty, it must hold all slots: the search for the order starts
// there.
template <typename Number>
void eplb_pack_copies(const std::vector<Number>& load_E, const EplbCopies& copies, int num_gpus, EplbPacks& packs);

}  // namespace eprt::balancer
