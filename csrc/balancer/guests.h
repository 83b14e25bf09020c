// Cross-node replicas: experts as guests on nodes other than their home, where that saves most traffic.
#pragma once

#include <cstddef>
#include <vector>

#include "homes.h"
#include "problem.h"
#include "traffic.h"

namespace eprt::balancer {

// What a copy of each expert on each node would save, or saves, everything else as it is; kept up to date while copies
// come and go. Exact where a token's visits do not depend on which of several replicas it takes; a screen elsewhere.
class Guests {
 public:
  // mask_E: the nodes of each expert's copies, one bit each.
  Guests(const Problem& problem, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
         std::vector<uint64_t> mask_E);

  double gain(int expert, int node) const { return gain_EN_[at(expert, node)]; }  // of a copy more, where there is none
  double loss(int expert, int node) const { return loss_EN_[at(expert, node)]; }  // of this copy less, others remaining
  double pull(int expert, int node) const { return pull_EN_[at(expert, node)]; }  // of being there instead of nowhere
  const std::vector<uint64_t>& masks() const { return mask_E_; }
  void add(int expert, int node) { set(expert, mask_E_[expert] | uint64_t{1} << node); }
  void remove(int expert, int node) { set(expert, mask_E_[expert] & ~(uint64_t{1} << node)); }

 private:
  size_t at(int expert, int node) const { return static_cast<size_t>(expert) * num_nodes_ + node; }
  void set(int expert, uint64_t mask);
  void count(int token, double sign);
  void count_on_two(int token, double weight);

  int num_nodes_;
  const Tokens& tokens_;
  const Incidence& incidence_;
  Traffic traffic_;
  std::vector<uint64_t> mask_E_;
  std::vector<double> gain_EN_, loss_EN_, pull_EN_;
};

}  // namespace eprt::balancer
