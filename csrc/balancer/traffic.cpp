#include "traffic.h"

#include <bit>

#include "node_sets.h"

namespace eprt::balancer {
namespace {

template <int kWords>
double fewest_visits(const std::vector<uint64_t>& masks, int own, int64_t num_nodes) {
  const NodeSets<kWords>& sets = NodeSets<kWords>::for_nodes(num_nodes);
  auto covers = sets.all();
  for (uint64_t mask : masks) sets.intersect(covers, sets.covering(mask));
  return sets.visits(covers, own);
}

// Greedy approximation for many nodes: how many other nodes a token on node `own` visits. masks: nodes of its experts.
int visited_nodes(const std::vector<uint64_t>& masks, int own) {
  const uint64_t here = uint64_t{1} << own;
  uint64_t visited = 0;
  for (uint64_t mask : masks)
    if (!(mask & here) && std::has_single_bit(mask)) visited |= mask;
  for (;;) {
    uint64_t open = 0;  // nodes that hold an expert not covered yet
    for (uint64_t mask : masks)
      if (!(mask & (here | visited))) open |= mask;
    if (!open) return std::popcount(visited);
    int best_node = 0, best_covered = 0;
    for (uint64_t rest = open; rest; rest &= rest - 1) {
      const int node = std::countr_zero(rest);
      int covered = 0;
      for (uint64_t mask : masks) covered += !(mask & (here | visited)) && (mask >> node & 1);
      if (covered > best_covered) best_covered = covered, best_node = node;
    }
    visited |= uint64_t{1} << best_node;
  }
}

int messages(const std::vector<uint64_t>& masks, int own) {
  int crossings = 0;
  for (uint64_t mask : masks) crossings += !(mask >> own & 1);
  return crossings;
}

}  // namespace

double crossings(const Tokens& tokens, int64_t token, Traffic traffic, int64_t num_nodes, const uint64_t* mask_E,
                 std::vector<uint64_t>& masks) {
  masks.clear();
  for (int64_t k = 0; k < tokens.num_choices; k++) {
    const int32_t expert = tokens.topk_TK[token * tokens.num_choices + k];
    if (expert >= 0) masks.push_back(mask_E[expert]);
  }
  if (traffic == Traffic::kNodeCopies && num_nodes <= kMaxNodesInSets) {
    const int own = tokens.node_T ? tokens.node_T[token] : -1;
    return tokens.weight(token) * (num_nodes <= NodeSets<1>::kMaxNodes ? fewest_visits<1>(masks, own, num_nodes)
                                                                       : fewest_visits<4>(masks, own, num_nodes));
  }
  const int first = tokens.node_T ? tokens.node_T[token] : 0;
  const int last = tokens.node_T ? first : static_cast<int>(num_nodes) - 1;
  int64_t sum = 0;
  for (int own = first; own <= last; own++)
    sum += traffic == Traffic::kNodeCopies ? visited_nodes(masks, own) : messages(masks, own);
  return tokens.weight(token) * static_cast<double>(sum) / (last - first + 1);
}

double count_traffic(const Tokens& tokens, Traffic traffic, int64_t num_nodes, const uint64_t* mask_E) {
  std::vector<uint64_t> masks;
  double total = 0.0;
  for (int64_t token = 0; token < tokens.num_tokens; token++)
    total += crossings(tokens, token, traffic, num_nodes, mask_E, masks);
  return total;
}

}  // namespace eprt::balancer
