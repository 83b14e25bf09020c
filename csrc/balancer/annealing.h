// Simulated annealing over which nodes hold copies of which experts.
//
// The gain of a single copy says little, because most copies save traffic only together with others. Annealing tries
// exchanges of any two experts and recounts the affected tokens.
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
  std::vector<int> count_E;    // copies of each expert on all nodes
  std::vector<int> min_E;      // copies that each expert must keep

  int& at(int expert, int node) { return copies_EN[static_cast<size_t>(expert) * num_nodes + node]; }
  int at(int expert, int node) const { return copies_EN[static_cast<size_t>(expert) * num_nodes + node]; }
  uint64_t mask(int expert) const {  // the nodes with a copy, one bit each
    uint64_t mask = 0;
    for (int node = 0; node < num_nodes; node++) mask |= uint64_t{at(expert, node) > 0} << node;
    return mask;
  }
};

// For at most kMaxNodesInSets nodes. Every node keeps its number of used slots. limit_N: load that a node should not
// exceed, with copies sharing evenly. work: budget of token evaluations. Deterministic for a given seed.
void anneal(const Part& part, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
            const std::vector<double>& limit_N, double work, uint64_t seed, NodeCopies& copies);

}  // namespace eprt::balancer
