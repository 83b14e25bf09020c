// Cross-node replicas: experts as guests on nodes other than their home, where that saves most traffic.
#pragma once

#include <cstddef>
#include <vector>

#include "homes.h"
#include "problem.h"
#include "traffic.h"

namespace eprt::balancer {

// Traffic saved by a copy of each expert on each node, kept up to date while copies are added.
class Guests {
 public:
  Guests(const Problem& problem, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
         const std::vector<int>& home_E);

  double gain(int expert, int node) const { return gain_EN_[static_cast<size_t>(expert) * num_nodes_ + node]; }
  bool present(int expert, int node) const { return mask_E_[expert] >> node & 1; }
  const std::vector<uint64_t>& masks() const { return mask_E_; }
  void add(int expert, int node);

 private:
  void count(int token, double sign);

  int num_nodes_;
  const Tokens& tokens_;
  const Incidence& incidence_;
  Traffic traffic_;
  std::vector<uint64_t> mask_E_;
  std::vector<double> gain_EN_;
};

}  // namespace eprt::balancer
