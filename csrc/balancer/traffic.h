// Network traffic between nodes under a placement, counted from sampled routing choices.
#pragma once

#include <cstdint>
#include <vector>

namespace eprt::balancer {

// Sampled tokens of one layer, mirrored by class CTokens in balancer/core.py.
struct Tokens {
  int64_t num_tokens;
  int64_t num_choices;
  const int32_t* topk_TK;  // chosen experts, -1 for a masked choice
  const int32_t* node_T;   // the node of each token; null: unknown, every node equally likely
  const float* weight_T;   // how many tokens each sampled token represents; null: one

  double weight(int64_t token) const { return weight_T ? weight_T[token] : 1.0; }
  double total_weight() const {
    double total = 0.0;
    for (int64_t token = 0; token < num_tokens; token++) total += weight(token);
    return total;
  }
};

enum class Traffic : int64_t {
  kNodeCopies,      // a token is sent once to each other node that computes it
  kExpertMessages,  // a token is sent once for each of its experts without a copy on its own node
};

// One token's crossings between nodes, times its weight. masks: scratch memory.
double crossings(const Tokens& tokens, int64_t token, Traffic traffic, int64_t num_nodes, const uint64_t* mask_E,
                 std::vector<uint64_t>& masks);

// Crossings of all tokens together. mask_E: the nodes on which each expert has a copy, one bit each (at most 64 nodes).
// kNodeCopies assumes that each token visits the fewest nodes that hold its experts. With more than 8 nodes that number
// is approximated greedily: first the unavoidable nodes, then the nodes that cover most of the remaining experts.
double count_traffic(const Tokens& tokens, Traffic traffic, int64_t num_nodes, const uint64_t* mask_E);

}  // namespace eprt::balancer
