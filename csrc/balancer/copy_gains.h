// CopyGains: how much traffic a copy of each expert on each node saves.
#pragma once

#include <cstddef>
#include <vector>

#include "homes.h"
#include "problem.h"
#include "traffic.h"

namespace eprt::balancer {

// For each expert and node: the traffic that a copy there saves, or would save if it were added, with all other copies
// left as they are. Exact if the nodes to which a token is sent do not depend on which of several copies it takes, else
// an estimate. Keeps references to tokens and incidence. At most 64 nodes.
class CopyGains {
 public:
  // mask_E: for each expert a bit per node, set if a copy is there.
  CopyGains(const Problem& problem, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
            std::vector<uint64_t> mask_E);

  // Traffic saved by a new copy on a node without one.
  double gain(int expert, int node) const { return gain_EN_[at(expert, node)]; }
  // Traffic added by removing this copy while others remain.
  double loss(int expert, int node) const { return loss_EN_[at(expert, node)]; }
  // Traffic saved by a copy on this node, compared with no copy anywhere.
  double pull(int expert, int node) const { return pull_EN_[at(expert, node)]; }
  void add_copy(int expert, int node) { set_nodes(expert, mask_E_[expert] | uint64_t{1} << node); }
  void remove_copy(int expert, int node) { set_nodes(expert, mask_E_[expert] & ~(uint64_t{1} << node)); }

 private:
  size_t at(int expert, int node) const { return static_cast<size_t>(expert) * num_nodes_ + node; }
  void set_nodes(int expert, uint64_t mask);
  // Adds (sign 1) or takes back (sign -1) one token's part of all three tables.
  void count_token(int token, double sign);
  // The same where it can be exact: two nodes, Traffic::kNodeCopies, tokens whose node is unknown.
  void count_on_two_nodes(int token, double weight);

  int num_nodes_;
  const Tokens& tokens_;
  const Incidence& incidence_;
  Traffic traffic_;
  std::vector<uint64_t> mask_E_;
  std::vector<double> gain_EN_, loss_EN_, pull_EN_;
};

}  // namespace eprt::balancer
