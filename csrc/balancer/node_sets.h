// NodeSets: the fewest nodes that hold all experts of a token, found by bit operations over all sets of nodes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace eprt::balancer {

// One bit for each of the 2^N sets of nodes: N <= 6 with one word, N <= 8 with four. A set covers an expert if one of
// its nodes has a copy. The sets that cover all experts of a token are the intersection of the experts' covering sets.
template <int kWords>
class NodeSets {
 public:
  using Bits = std::array<uint64_t, kWords>;
  static constexpr int kMaxNodes = kWords == 1 ? 6 : 8;

  static const NodeSets& for_nodes(int64_t num_nodes) {
    static const auto all = [] {
      std::vector<NodeSets> sets;
      for (int nodes = 0; nodes <= kMaxNodes; nodes++) sets.push_back(NodeSets(nodes));
      return sets;
    }();
    return all[num_nodes];
  }

  // The sets that cover an expert whose copies are on these nodes, one bit each.
  const Bits& covering(uint64_t mask) const { return covering_[mask]; }
  const Bits& all() const { return all_; }
  static void intersect(Bits& bits, const Bits& with) {
    for (int word = 0; word < kWords; word++) bits[word] &= with[word];
  }

  // How many other nodes a token on node `own` must visit. own < 0: the node is unknown, each equally likely. covers:
  // the sets that cover all of its experts.
  double visits(const Bits& covers, int own) const {
    return own < 0 && !visits_.empty() ? visits_[covers[0]] : count_visits(covers, own);
  }

 private:
  explicit NodeSets(int num_nodes)
      : num_nodes_(num_nodes), covering_(size_t{1} << num_nodes), of_size_(num_nodes + 1), with_(num_nodes) {
    for (unsigned set = 0; set < covering_.size(); set++) {
      auto mark = [&](Bits& bits) { bits[set / 64] |= uint64_t{1} << set % 64; };
      mark(all_);
      mark(of_size_[std::popcount(set)]);
      for (int node = 0; node < num_nodes; node++)
        if (set >> node & 1) mark(with_[node]);
      for (unsigned mask = 0; mask < covering_.size(); mask++)
        if (set & mask) mark(covering_[mask]);
    }
    if (num_nodes > kMaxNodesInTable) return;
    visits_.assign(all_[0] + 1, 0.0F);            // odd index: the empty set covers all, nothing to visit
    const uint64_t everywhere = all_[0] / 2 + 1;  // the set of all nodes covers every expert
    for (uint64_t covers = 0; covers <= all_[0]; covers += 2)
      visits_[covers] = static_cast<float>(count_visits({covers | everywhere}, -1));
  }

  double count_visits(const Bits& covers, int own) const {
    int size = 0;
    while (!overlap(covers, of_size_[size])) size++;
    if (size == 0) return 0.0;  // no experts
    Bits smallest = covers;
    intersect(smallest, of_size_[size]);
    if (own >= 0) return size - overlap(smallest, with_[own]);
    int inside = 0;  // possible own nodes that are in one of the smallest sets
    for (int node = 0; node < num_nodes_; node++) inside += overlap(smallest, with_[node]);
    return size - static_cast<double>(inside) / num_nodes_;
  }
  static bool overlap(const Bits& a, const Bits& b) {
    uint64_t both = 0;
    for (int word = 0; word < kWords; word++) both |= a[word] & b[word];
    return both != 0;
  }

  static constexpr int kMaxNodesInTable = 4;
  int num_nodes_;
  Bits all_{};
  std::vector<Bits> covering_, of_size_, with_;
  std::vector<float> visits_;  // indexed by `covers`; only for few nodes
};

constexpr int kMaxNodesInSets = NodeSets<4>::kMaxNodes;

}  // namespace eprt::balancer
