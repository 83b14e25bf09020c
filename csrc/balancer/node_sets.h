// Fewest nodes that hold all experts of a token, found for all sets of few nodes at once.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace eprt::balancer {

// One bit for each of the 2^N sets of nodes, N <= 6 with one word and N <= 8 with four. A set "covers" an expert when
// one of its nodes has a copy; the sets that cover each of a token's experts are the intersection of theirs.
template <int kWords>
class NodeSets {
 public:
  using Bits = std::array<uint64_t, kWords>;
  static constexpr int kMaxNodes = kWords == 1 ? 6 : 8;

  static const NodeSets& of(int64_t num_nodes) {
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
  static void keep(Bits& bits, const Bits& of) {
    for (int word = 0; word < kWords; word++) bits[word] &= of[word];
  }

  // Other nodes that a token on node `own` must visit; own < 0: on any node, equally likely. covers: the sets that
  // cover all of its experts.
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
    visits_.assign(all_[0] + 1, 0.0F);            // odd: the empty set covers all, so there is nothing to visit
    const uint64_t everywhere = all_[0] / 2 + 1;  // all nodes together cover whatever there is
    for (uint64_t covers = 0; covers <= all_[0]; covers += 2)
      visits_[covers] = static_cast<float>(count_visits({covers | everywhere}, -1));
  }

  double count_visits(const Bits& covers, int own) const {
    int size = 0;
    while (!meet(covers, of_size_[size])) size++;
    if (size == 0) return 0.0;  // no experts
    Bits smallest = covers;
    keep(smallest, of_size_[size]);
    if (own >= 0) return size - meet(smallest, with_[own]);
    int inside = 0;  // own nodes that are themselves in one of the smallest sets
    for (int node = 0; node < num_nodes_; node++) inside += meet(smallest, with_[node]);
    return size - static_cast<double>(inside) / num_nodes_;
  }
  static bool meet(const Bits& a, const Bits& b) {
    uint64_t both = 0;
    for (int word = 0; word < kWords; word++) both |= a[word] & b[word];
    return both != 0;
  }

  static constexpr int kMaxNodesInTable = 4;
  int num_nodes_;
  Bits all_{};
  std::vector<Bits> covering_, of_size_, with_;
  std::vector<float> visits_;  // by what covers, for very few nodes
};

constexpr int kMaxNodesInSets = NodeSets<4>::kMaxNodes;

}  // namespace eprt::balancer
