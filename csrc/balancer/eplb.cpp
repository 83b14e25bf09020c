#include "eplb.h"

#include <algorithm>
#include <numeric>
#include <queue>

namespace eprt::balancer {
namespace {

// EPLB computes in fp32 and breaks ties by position. Every sum below is fp32 and in EPLB's order, so the compiler must
// not fuse or reorder operations (see CMakeLists.txt).

struct Pack {
  float load;
  int index;
  bool operator>(const Pack& other) const { return load != other.load ? load > other.load : index > other.index; }
};

// Places the largest items first, each in the least loaded pack with room. pack_N: the pack of each item, rank_N: its
// position in the pack.
void pack_evenly(const std::vector<float>& load_N, int num_packs, std::vector<int>& pack_N, std::vector<int>& rank_N) {
  const int num_items = static_cast<int>(load_N.size()), capacity = num_items / num_packs;
  pack_N.resize(num_items);
  rank_N.assign(num_items, 0);
  if (capacity == 1) {
    std::iota(pack_N.begin(), pack_N.end(), 0);
    return;
  }
  std::vector<int> order(num_items);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return load_N[a] > load_N[b]; });
  std::priority_queue<Pack, std::vector<Pack>, std::greater<Pack>> open;
  for (int pack = 0; pack < num_packs; pack++) open.push({0.0f, pack});
  std::vector<int> held(num_packs, 0);
  for (int item : order) {
    Pack pack = open.top();
    open.pop();
    pack_N[item] = pack.index;
    rank_N[item] = held[pack.index]++;
    pack.load += load_N[item];
    if (held[pack.index] < capacity) open.push(pack);
  }
}

struct Busiest {
  float share;
  int expert;
  bool operator<(const Busiest& other) const {
    return share != other.share ? share < other.share : expert > other.expert;
  }
};

// Gives slot after slot to the expert with the largest load per replica.
void replicate(const std::vector<float>& load_E, int num_slots, std::vector<int>& expert_P, std::vector<int>& replica_P,
               std::vector<int>& count_E) {
  const int num_experts = static_cast<int>(load_E.size());
  expert_P.resize(num_slots);
  replica_P.assign(num_slots, 0);
  count_E.assign(num_experts, 1);
  std::iota(expert_P.begin(), expert_P.begin() + num_experts, 0);
  std::priority_queue<Busiest> heap;
  for (int expert = 0; expert < num_experts; expert++) heap.push({load_E[expert], expert});
  for (int slot = num_experts; slot < num_slots; slot++) {
    Busiest top = heap.top();
    heap.pop();
    expert_P[slot] = top.expert;
    replica_P[slot] = count_E[top.expert]++;
    heap.push({load_E[top.expert] / static_cast<float>(count_E[top.expert]), top.expert});
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

void eplb_layer(const EplbShape& shape, const float* load_E, int64_t* slot_P, int64_t* replica_P) {
  const int num_groups = static_cast<int>(shape.num_groups), num_nodes = static_cast<int>(shape.num_nodes);
  const int group_size = static_cast<int>(shape.num_experts) / num_groups;
  const int node_experts = static_cast<int>(shape.num_experts) / num_nodes;
  const int node_slots = static_cast<int>(shape.num_slots) / num_nodes;
  const int node_gpus = static_cast<int>(shape.num_gpus) / num_nodes;
  std::vector<float> load_of_group(num_groups);
  for (int group = 0; group < num_groups; group++)
    load_of_group[group] = sum_as_torch(load_E + group * group_size, group_size);
  std::vector<int> node_of_group, rank_of_group;
  pack_evenly(load_of_group, num_nodes, node_of_group, rank_of_group);
  std::vector<int> expert_of_place(shape.num_experts);  // experts ordered by node, then by group within the node
  for (int group = 0; group < num_groups; group++) {
    const int place = (node_of_group[group] * (num_groups / num_nodes) + rank_of_group[group]) * group_size;
    std::iota(&expert_of_place[place], &expert_of_place[place] + group_size, group * group_size);
  }
  std::vector<float> node_load(node_experts), slot_load(node_slots);
  std::vector<int> expert_P, replica, count_E, gpu_P, rank_P;
  for (int node = 0; node < num_nodes; node++) {
    const int* expert_of = &expert_of_place[node * node_experts];
    for (int i = 0; i < node_experts; i++) node_load[i] = load_E[expert_of[i]];
    replicate(node_load, node_slots, expert_P, replica, count_E);
    for (int slot = 0; slot < node_slots; slot++)
      slot_load[slot] = node_load[expert_P[slot]] / static_cast<float>(count_E[expert_P[slot]]);
    pack_evenly(slot_load, node_gpus, gpu_P, rank_P);
    for (int slot = 0; slot < node_slots; slot++) {
      const int64_t target = node * node_slots + gpu_P[slot] * (node_slots / node_gpus) + rank_P[slot];
      slot_P[target] = expert_of[expert_P[slot]];
      replica_P[target] = replica[slot];
    }
  }
}

}  // namespace eprt::balancer
