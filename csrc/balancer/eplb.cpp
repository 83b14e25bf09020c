#include "eplb.h"

#include <algorithm>
#include <numeric>

#include "greedy.h"

namespace eprt::balancer {
namespace {

// EPLB breaks ties by position, and each planner rounds in its own way. Every sum below is of one precision and in
// their order, so the compiler must not fuse or reorder operations (see CMakeLists.txt).

// Places the heaviest items first, each in the lightest pack with room.
template <typename Number>
void pack_evenly(const std::vector<Number>& weight_N, int num_packs, EplbPacks& packs) {
  const int num_items = static_cast<int>(weight_N.size()), capacity = num_items / num_packs;
  packs.pack_N.resize(num_items);
  packs.rank_N.assign(num_items, 0);
  if (capacity == 1) {
    std::iota(packs.pack_N.begin(), packs.pack_N.end(), 0);
    return;
  }
  std::vector<Weighed<Number>> open(num_packs);
  for (int pack = 0; pack < num_packs; pack++) open[pack] = {0, pack};
  std::vector<int> held(num_packs, 0);
  if (packs.order.empty())
    packs.order = heaviest_first(weight_N);
  else
    insert_heaviest_first(weight_N, packs.order);
  for (int item : packs.order) {
    Weighed<Number>& pack = open[0];
    packs.pack_N[item] = pack.index;
    packs.rank_N[item] = held[pack.index]++;
    pack.weight += weight_N[item];
    if (held[pack.index] < capacity)
      sink_first(open, lighter<Weighed<Number>>);
    else
      drop_first(open, lighter<Weighed<Number>>);
  }
}

// The sum as torch computes it over a contiguous last dimension: vectors of 8 in 4 chains, each chain a cascade (sums
// of 16 terms, then sums of those). The groups' packing depends on its rounding; tests compare it with torch.
float sum_as_torch(const float* x, int size) {
  constexpr int kWidth = 8, kChains = 4, kLevels = 4;
  const int num_vectors = size / kWidth, rows = num_vectors / kChains;
  int log2_rows = 0;
  while ((1 << log2_rows) < rows) log2_rows++;
  const int level_power = std::max(4, log2_rows / kLevels);
  float level[kLevels][kChains][kWidth] = {};
  auto add_row = [&](int row) {
    for (int c = 0; c < kChains; c++)
      for (int i = 0; i < kWidth; i++) level[0][c][i] += x[(row * kChains + c) * kWidth + i];
  };
  auto fold = [&](int into, int from) {
    for (int c = 0; c < kChains; c++)
      for (int i = 0; i < kWidth; i++) level[into][c][i] += level[from][c][i];
  };
  int row = 0;
  while (row + (1 << level_power) <= rows) {
    for (int end = row + (1 << level_power); row < end; row++) add_row(row);
    for (int up = 1; up < kLevels; up++) {
      fold(up, up - 1);
      for (auto& chain : level[up - 1]) std::fill(chain, chain + kWidth, 0.0f);
      if (row & (((1 << level_power) - 1) << (up * level_power))) break;
    }
  }
  for (; row < rows; row++) add_row(row);
  for (int up = 1; up < kLevels; up++) fold(0, up);
  auto& chain = level[0];
  for (int v = rows * kChains; v < num_vectors; v++)
    for (int i = 0; i < kWidth; i++) chain[0][i] += x[v * kWidth + i];
  for (int c = 1; c < kChains; c++)
    for (int i = 0; i < kWidth; i++) chain[0][i] += chain[c][i];
  float total = 0.0f;
  for (int i = num_vectors * kWidth; i < size; i++) total += x[i];
  for (int i = 0; i < kWidth; i++) total += chain[0][i];
  return total;
}

}  // namespace

std::vector<float> eplb_group_loads(const EplbShape& shape, const float* load_E) {
  const int64_t group_size = shape.num_experts / shape.num_groups;
  std::vector<float> loads(shape.num_groups);
  for (int64_t group = 0; group < shape.num_groups; group++)
    loads[group] = sum_as_torch(load_E + group * group_size, static_cast<int>(group_size));
  return loads;
}

template <typename Number>
EplbCopies eplb_copies(const std::vector<Number>& load_E, int num_slots) {
  const int num_experts = static_cast<int>(load_E.size());
  EplbCopies copies{std::vector<int>(num_slots), std::vector<int>(num_slots, 0), std::vector<int>(num_experts, 1)};
  std::iota(copies.expert_P.begin(), copies.expert_P.begin() + num_experts, 0);
  if (num_slots == num_experts) return copies;
  std::vector<Weighed<Number>> shares(num_experts);
  for (int expert = 0; expert < num_experts; expert++) shares[expert] = {load_E[expert], expert};
  std::make_heap(shares.begin(), shares.end(), [](const auto& a, const auto& b) { return heavier(b, a); });
  for (int slot = num_experts; slot < num_slots; slot++) {
    const int expert = shares[0].index;
    copies.expert_P[slot] = expert;
    copies.replica_P[slot] = copies.count_E[expert]++;
    shares[0].weight = load_E[expert] / static_cast<Number>(copies.count_E[expert]);
    sink_first(shares, heavier<Weighed<Number>>);
  }
  return copies;
}

template <typename Number>
bool eplb_copies_hold(const std::vector<Number>& load_E, const EplbCopies& copies) {
  Number next = 0;  // the largest load per copy that was left
  for (size_t expert = 0; expert < load_E.size(); expert++)
    next = std::max(next, load_E[expert] / static_cast<Number>(copies.count_E[expert]));
  for (size_t slot = load_E.size(); slot < copies.expert_P.size(); slot++)
    if (load_E[copies.expert_P[slot]] / static_cast<Number>(copies.replica_P[slot]) <= next) return false;
  return true;
}

template <typename Number>
void eplb_pack_copies(const std::vector<Number>& load_E, const EplbCopies& copies, int num_gpus, EplbPacks& packs) {
  std::vector<Number> share_P(copies.expert_P.size());
  for (size_t slot = 0; slot < share_P.size(); slot++) {
    const int expert = copies.expert_P[slot];
    share_P[slot] = load_E[expert] / static_cast<Number>(copies.count_E[expert]);
  }
  pack_evenly(share_P, num_gpus, packs);
}

template EplbCopies eplb_copies(const std::vector<float>&, int);
template EplbCopies eplb_copies(const std::vector<double>&, int);
template bool eplb_copies_hold(const std::vector<double>&, const EplbCopies&);
template void eplb_pack_copies(const std::vector<float>&, const EplbCopies&, int, EplbPacks&);
template void eplb_pack_copies(const std::vector<double>&, const EplbCopies&, int, EplbPacks&);

void eplb_layer(const EplbShape& shape, const float* load_E, int64_t* slot_P, int64_t* replica_P) {
  const int num_groups = static_cast<int>(shape.num_groups), num_nodes = static_cast<int>(shape.num_nodes);
  const int group_size = static_cast<int>(shape.num_experts) / num_groups;
  const int node_experts = static_cast<int>(shape.num_experts) / num_nodes;
  const int node_slots = static_cast<int>(shape.num_slots) / num_nodes;
  const int node_gpus = static_cast<int>(shape.num_gpus) / num_nodes;
  EplbPacks packs;
  pack_evenly(eplb_group_loads(shape, load_E), num_nodes, packs);
  std::vector<int> expert_of_place(shape.num_experts);  // experts ordered by node, then by group within the node
  for (int group = 0; group < num_groups; group++) {
    const int place = (packs.pack_N[group] * (num_groups / num_nodes) + packs.rank_N[group]) * group_size;
    std::iota(&expert_of_place[place], &expert_of_place[place] + group_size, group * group_size);
  }
  std::vector<float> node_load(node_experts);
  for (int node = 0; node < num_nodes; node++) {
    const int* expert_of = &expert_of_place[node * node_experts];
    for (int i = 0; i < node_experts; i++) node_load[i] = load_E[expert_of[i]];
    const EplbCopies copies = eplb_copies(node_load, node_slots);
    packs.order.clear();
    eplb_pack_copies(node_load, copies, node_gpus, packs);
    for (int slot = 0; slot < node_slots; slot++) {
      const int64_t target = node * node_slots + packs.pack_N[slot] * (node_slots / node_gpus) + packs.rank_N[slot];
      slot_P[target] = expert_of[copies.expert_P[slot]];
      replica_P[target] = copies.replica_P[slot];
    }
  }
}

}  // namespace eprt::balancer
