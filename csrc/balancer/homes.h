// Home nodes: assigns every expert to one node so that the experts of a token are on few nodes.
#pragma once

#include <vector>

#include "problem.h"
#include "traffic.h"

namespace eprt::balancer {

// Which tokens chose which experts, indexed both ways.
struct Incidence {
  Incidence(const Tokens& tokens, int num_experts);
  std::vector<std::vector<int>> tokens_E;   // distinct tokens of each expert, ascending
  std::vector<std::vector<int>> experts_T;  // distinct experts of each token
};

struct NodeLimits {
  std::vector<int> experts_N;  // number of homes on each node; they add up to the number of experts
  std::vector<double> load_N;  // load that the homes on each node should not exceed
};

// Exchanges the homes of pairs of experts while that saves traffic or lowers a node's load that exceeds its limit.
// start: a home for each expert that meets experts_N. Returns the node of each expert.
std::vector<int> refine_homes(const Problem& problem, int64_t layer, const Tokens& tokens, const Incidence& incidence,
                              Traffic traffic, const NodeLimits& limits, int max_passes, std::vector<int> start);

// Fills one node after the other, each time with the expert most often chosen together with those already there.
std::vector<int> cluster_homes(const Problem& problem, int64_t layer, const Tokens& tokens, const Incidence& incidence,
                               const NodeLimits& limits);

}  // namespace eprt::balancer
