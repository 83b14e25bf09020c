// The node stage: every expert gets a home node, so that tokens find their experts on few nodes.
#pragma once

#include <vector>

#include "problem.h"
#include "traffic.h"

namespace eprt::balancer {

// Tokens and experts, each by the other.
struct Incidence {
  Incidence(const Tokens& tokens, int num_experts);
  std::vector<std::vector<int>> tokens_E;   // distinct tokens of each expert, ascending
  std::vector<std::vector<int>> experts_T;  // distinct experts of each token
};

struct NodeLimits {
  std::vector<int> experts_N;  // homes that a node must take, together all experts
  std::vector<double> load_N;  // load that a node's homes should not exceed
};

// start: a home for each expert that meets experts_N. Pairs of experts change homes while that saves traffic, and while
// a node's load exceeds its limit. Returns the node of each expert.
std::vector<int> refine_homes(const Problem& problem, int64_t layer, const Tokens& tokens, const Incidence& incidence,
                              Traffic traffic, const NodeLimits& limits, int max_passes, std::vector<int> start);

// Nodes filled one after the other with the experts most often chosen together with those already there.
std::vector<int> cluster_homes(const Problem& problem, int64_t layer, const Tokens& tokens, const Incidence& incidence,
                               const NodeLimits& limits);

}  // namespace eprt::balancer
