// Which nodes have copies of which experts, homes and guests together: simulated annealing.
//
// What a single copy saves by itself says little: most copies save something only together with others. Here any two
// change places and the tokens are asked.
#pragma once

#include <cstdint>
#include <vector>

#include "homes.h"
#include "node_sets.h"
#include "packing.h"
#include "traffic.h"

namespace eprt::balancer {

struct NodeCopies {
  int num_nodes = 0;
  std::vector<int> copies_EN;  // copies of each expert on each node
  std::vector<int> count_E;    // of each expert together
  std::vector<int> min_E;      // fewest that it must keep

  int& at(int expert, int node) { return copies_EN[static_cast<size_t>(expert) * num_nodes + node]; }
  int at(int expert, int node) const { return copies_EN[static_cast<size_t>(expert) * num_nodes + node]; }
};

// For at most kMaxNodesInSets nodes. Every node keeps as many slots in use. limit_N: load (copies sharing evenly) that
// a node should not exceed. work: how many times a token may be asked. Deterministic for a seed.
void anneal(const Part& part, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
            const std::vector<double>& limit_N, double work, uint64_t seed, NodeCopies& copies);

}  // namespace eprt::balancer
