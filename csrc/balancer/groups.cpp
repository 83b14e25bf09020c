// Assigns whole expert groups to nodes: a partition problem, solved exactly where it is small enough.

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "plan.h"

namespace eprt::balancer {
namespace {

// 8 groups on 4 nodes have 105 partitions, 16 on 4 have millions: then the best one found within the limit is used.
constexpr int kMaxVisits = 20000;

struct NodeRoom {
  double speed = 0.0;
  int usable = 0, live = 0;
  int capacity = 0;  // in groups
  bool operator==(const NodeRoom& other) const { return speed == other.speed && capacity == other.capacity; }
};

std::vector<NodeRoom> describe_nodes(const Problem& problem, int64_t layer) {
  std::vector<NodeRoom> nodes(problem.num_nodes);
  for (int64_t gpu = 0; gpu < problem.num_gpus; gpu++) {
    NodeRoom& node = nodes[gpu / problem.gpus_per_node()];
    const int usable = problem.usable(layer, gpu);
    node.usable += usable;
    if (usable > 0) node.live++, node.speed += problem.speed_G[gpu];
  }
  const bool alike = std::all_of(nodes.begin(), nodes.end(), [&](const NodeRoom& node) {
    return node.speed == nodes[0].speed && node.usable == nodes[0].usable && node.live == nodes[0].live;
  });
  const int64_t group_slots = problem.num_experts / problem.num_groups * problem.min_copies;
  int64_t room = 0;
  for (NodeRoom& node : nodes) {
    const bool covers = node.live >= problem.min_copies;
    node.capacity = covers ? static_cast<int>(node.usable / group_slots) : 0;
    if (alike) node.capacity = std::min(node.capacity, static_cast<int>(problem.num_groups / problem.num_nodes));
    room += node.capacity;
  }
  if (room < problem.num_groups)
    throw std::runtime_error("layer " + std::to_string(layer) + ": the nodes' usable slots have room for " +
                             std::to_string(room) + " whole groups of " + std::to_string(problem.num_groups) +
                             "; num_groups=1 plans globally");
  return nodes;
}

class GroupSearch {
 public:
  GroupSearch(std::vector<double> load_of_group, std::vector<NodeRoom> nodes)
      : load_of_group_(std::move(load_of_group)),
        nodes_(std::move(nodes)),
        order_(load_of_group_.size()),
        node_of_group_(load_of_group_.size(), -1),
        load_(nodes_.size(), 0.0),
        count_(nodes_.size(), 0) {
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return load_of_group_[a] > load_of_group_[b]; });
    descend(0, 0.0);
  }

  std::vector<int> best;
  double best_time = 1e308;

 private:
  // The first descent is greedy: the largest group first, to the node that finishes earliest.
  void descend(size_t depth, double time_so_far) {
    if (time_so_far >= best_time || (visits_++ >= kMaxVisits && !best.empty())) return;
    if (depth == order_.size()) {
      best = node_of_group_, best_time = time_so_far;
      return;
    }
    const int group = order_[depth];
    std::vector<std::pair<double, int>> choices;
    for (int node = 0; node < static_cast<int>(nodes_.size()); node++) {
      if (count_[node] >= nodes_[node].capacity || equals_earlier_node(node)) continue;
      choices.emplace_back((load_[node] + load_of_group_[group]) / nodes_[node].speed, node);
    }
    std::sort(choices.begin(), choices.end());
    for (const auto& [time, node] : choices) {
      node_of_group_[group] = node;
      load_[node] += load_of_group_[group], count_[node]++;
      descend(depth + 1, std::max(time_so_far, time));
      load_[node] -= load_of_group_[group], count_[node]--;
    }
  }

  // Nodes in the same state lead to the same partitions with the nodes renamed.
  bool equals_earlier_node(int node) const {
    for (int other = 0; other < node; other++)
      if (nodes_[other] == nodes_[node] && count_[other] == count_[node] && load_[other] == load_[node]) return true;
    return false;
  }

  std::vector<double> load_of_group_;
  std::vector<NodeRoom> nodes_;
  std::vector<int> order_, node_of_group_;
  std::vector<double> load_;
  std::vector<int> count_;
  int visits_ = 0;
};

}  // namespace

std::vector<int> groups_to_nodes(const Problem& problem, int64_t layer, double* best_time) {
  const int64_t group_size = problem.num_experts / problem.num_groups;
  const double* load_E = problem.load_E(layer);
  std::vector<double> load_of_group(problem.num_groups);
  for (int64_t group = 0; group < problem.num_groups; group++)
    load_of_group[group] = std::accumulate(load_E + group * group_size, load_E + (group + 1) * group_size, 0.0);
  GroupSearch search(std::move(load_of_group), describe_nodes(problem, layer));
  if (search.best.empty()) throw std::runtime_error("layer " + std::to_string(layer) + ": groups do not fit the nodes");
  *best_time = search.best_time;
  return search.best;
}

}  // namespace eprt::balancer
