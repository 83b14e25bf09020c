// What a placement makes tokens cost on the network between nodes, counted from sampled routing choices.
#pragma once

#include <cstdint>
#include <vector>

namespace eprt::balancer {

// Sampled tokens of one layer. topk_TK: experts, -1 for none. node_T: the node each token is on; null: any, equally
// likely. weight_T: how many tokens each stands for; null: one.
struct Tokens {
  int64_t num_tokens;
  int64_t num_choices;
  const int32_t* topk_TK;
  const int32_t* node_T;
  const float* weight_T;

  double weight(int64_t token) const { return weight_T ? weight_T[token] : 1.0; }
};

enum class Traffic : int64_t {
  kNodeCopies,      // a token crosses once to each other node that computes it
  kExpertMessages,  // once for each of its experts that has no copy on its own node
};

// One token's crossings, times its weight. masks: scratch memory.
double crossings(const Tokens& tokens, int64_t token, Traffic traffic, int64_t num_nodes, const uint64_t* mask_E,
                 std::vector<uint64_t>& masks);

// mask_E: the nodes on which each expert has a copy, one bit each (at most 64 nodes).
// Crossings of all tokens together. Node copies assume that each token visits the fewest nodes that hold its experts;
// with more than 8 nodes that is approached greedily: the nodes that it cannot avoid, then those that cover most of the
// rest.
double count_traffic(const Tokens& tokens, Traffic traffic, int64_t num_nodes, const uint64_t* mask_E);

}  // namespace eprt::balancer
