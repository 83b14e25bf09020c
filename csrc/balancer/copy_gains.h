// CopyGains: how much traffic a copy of each expert on each node saves.
#pragma once

#include <cstddef>
#include <vector>

#include "homes.h"
#include "problem.h"
#include "traffic.h"

namespace eprt::balancer {

// Traffic that a copy of each expert on each node saves or would save while all other copies stay. Exact where a
// token's visits do not depend on which of several replicas it takes, else an estimate.
class CopyGains {
 public:
  // mask_E: the nodes of each expert's copies, one bit each.
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
  void count_token(int token, double sign);
  void count_on_two_nodes(int token, double weight);

  int num_nodes_;
  const Tokens& tokens_;
  const Incidence& incidence_;
  Traffic traffic_;
  std::vector<uint64_t> mask_E_;
  std::vector<double> gain_EN_, loss_EN_, pull_EN_;
};

}  // namespace eprt::balancer
