// Divides a layer into parts and writes their packings to the layer's slots.

#include <algorithm>
#include <numeric>

#include "plan.h"

namespace eprt::balancer {

Part make_part(const Problem& problem, int64_t layer, const std::vector<int>& experts, int first_gpu, int num_gpus) {
  Part part;
  const double* load_E = problem.load_E(layer);
  for (int expert : experts) {
    part.load_E.push_back(load_E[expert]);
    part.tie_rank_E.push_back(problem.tie_rank_E[expert]);
  }
  for (int gpu = first_gpu; gpu < first_gpu + num_gpus; gpu++) {
    part.speed_G.push_back(problem.speed_G[gpu]);
    const int usable = problem.usable(layer, gpu);
    part.usable_G.push_back(std::min(usable, part.num_experts()));
  }
  part.slots_per_gpu = static_cast<int>(problem.slots_per_gpu);
  part.gpus_per_node = static_cast<int>(problem.gpus_per_node());
  part.min_copies = static_cast<int>(problem.min_copies);
  return part;
}

Part whole_layer(const Problem& problem, int64_t layer) {
  std::vector<int> all(problem.num_experts);
  std::iota(all.begin(), all.end(), 0);
  return make_part(problem, layer, all, 0, static_cast<int>(problem.num_gpus));
}

void write_slots(const Packing& packing, const std::vector<int>& experts, int first_gpu, int64_t* slot_P, bool sorted) {
  const int per_gpu = packing.part().slots_per_gpu;
  for (int gpu = 0; gpu < packing.part().num_gpus(); gpu++) {
    int64_t* slots = slot_P + static_cast<int64_t>(first_gpu + gpu) * per_gpu;
    std::fill(slots, slots + per_gpu, kEmpty);
    for (int i = 0; i < packing.num_held(gpu); i++) slots[i] = experts[packing.experts(gpu)[i]];
    if (sorted) std::sort(slots, slots + packing.num_held(gpu));
  }
}

double largest_even_time(const Problem& problem, int64_t layer, const int64_t* slot_P) {
  const double* load_E = problem.load_E(layer);
  std::vector<int> count_E(problem.num_experts, 0);
  for (int64_t slot = 0; slot < problem.num_slots(); slot++)
    if (slot_P[slot] >= 0) count_E[slot_P[slot]]++;
  double largest = 0.0;
  for (int64_t gpu = 0; gpu < problem.num_gpus; gpu++) {
    double load = 0.0;
    for (int64_t slot = gpu * problem.slots_per_gpu; slot < (gpu + 1) * problem.slots_per_gpu; slot++)
      if (slot_P[slot] >= 0) load += load_E[slot_P[slot]] / count_E[slot_P[slot]];
    if (problem.speed_G[gpu] > 0) largest = std::max(largest, load / problem.speed_G[gpu]);
  }
  return largest;
}

Division divide(const Problem& problem, int64_t layer) {
  std::vector<int> all(problem.num_experts);
  std::iota(all.begin(), all.end(), 0);
  Division parts{{all}, static_cast<int>(problem.num_gpus), lower_bound(whole_layer(problem, layer))};
  if (!problem.hierarchical) return parts;
  double best_time = 0.0;
  std::vector<int> node_of_group = groups_to_nodes(problem, layer, &best_time);
  const double* load_E = problem.load_E(layer);
  const bool equal = std::all_of(load_E, load_E + problem.num_experts, [&](double load) { return load == load_E[0]; });
  std::vector<int> size_of_node(problem.num_nodes, 0);
  for (int node : node_of_group) size_of_node[node]++;
  if (equal) {  // the same number of groups per node, but in order
    int node = 0;
    for (int& of_group : node_of_group) {
      while (size_of_node[node] == 0) node++;
      of_group = node, size_of_node[node]--;
    }
  }
  parts.experts.assign(problem.num_nodes, {});
  for (int expert : all)
    parts.experts[node_of_group[expert / (problem.num_experts / problem.num_groups)]].push_back(expert);
  parts.gpus_per_part = static_cast<int>(problem.gpus_per_node());
  parts.bound = std::max(parts.bound, best_time);
  return parts;
}

}  // namespace eprt::balancer
