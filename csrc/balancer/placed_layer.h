// The placement of one layer while it is changed, with a record of every change.
#pragma once

#include <algorithm>
#include <vector>

#include "incremental.h"
#include "packing.h"

namespace eprt::balancer {

// A packing whose copies occupy slots. Every slot that changes is recorded, grouped in steps.
class PlacedLayer {
 public:
  PlacedLayer(const Problem& problem, int64_t layer, const Part& part, const int64_t* current_P)
      : packing(part),
        layer_(layer),
        per_gpu_(problem.slots_per_gpu),
        gpus_per_node_(static_cast<int>(problem.gpus_per_node())),
        hierarchical_(problem.hierarchical),
        slot_P_(current_P, current_P + problem.num_slots()),
        on_node_EN_(part.num_experts() * problem.num_nodes, 0),
        num_nodes_(problem.num_nodes),
        home_E_(problem.hierarchical ? group_homes(problem, current_P) : std::vector<int>()) {
    for (int64_t slot = 0; slot < problem.num_slots(); slot++) {
      const int64_t expert = slot_P_[slot];
      if (expert == kEmpty) continue;
      const int gpu = static_cast<int>(slot / per_gpu_);
      on_node_EN_[expert * num_nodes_ + gpu / gpus_per_node_] = 1;
      if (packing.part().usable_G[gpu] == 0 || packing.holds(gpu, static_cast<int>(expert)))
        record_change(slot, kEmpty);  // a masked GPU, or a second copy on one GPU
      else
        packing.add_copy(static_cast<int>(expert), gpu);
    }
  }

  // In the hierarchical policy experts move only to nodes that held them at the start; more copies may go anywhere.
  bool may_move_to(int gpu, int expert) const {
    return !hierarchical_ || on_node_EN_[expert * num_nodes_ + gpu / gpus_per_node_];
  }
  // Whether the GPU may drop its copy: enough copies remain, in the hierarchical policy one on the group's node.
  bool can_spare(int expert, int gpu) const {
    if (packing.count(expert) <= packing.part().min_copies) return false;
    const int home = home_E_.empty() ? -1 : home_E_[expert];
    if (gpu / gpus_per_node_ != home) return true;
    const auto& gpus = packing.gpus(expert);
    return std::count_if(gpus.begin(), gpus.end(), [&](int other) { return other / gpus_per_node_ == home; }) > 1;
  }
  void allow_everywhere(int expert) { std::fill_n(on_node_EN_.begin() + expert * num_nodes_, num_nodes_, uint8_t{1}); }

  void drop_copy(int expert, int gpu) {
    packing.remove_copy(expert, gpu);
    record_change(slot_of(expert, gpu), kEmpty);
  }
  void add_copy(int expert, int gpu) {
    packing.add_copy(expert, gpu);
    record_change(slot_of(kEmpty, gpu), expert);
  }
  void replace_copy(int taken, int given, int gpu) {
    packing.remove_copy(taken, gpu);
    packing.add_copy(given, gpu);
    record_change(slot_of(taken, gpu), given);
  }
  void exchange_copies(int a, int gpu_a, int b, int gpu_b) {
    packing.exchange_copies(a, gpu_a, b, gpu_b);
    const int64_t slot_a = slot_of(a, gpu_a), slot_b = slot_of(b, gpu_b);
    record_change(slot_a, b);
    record_change(slot_b, a);
  }
  void move_copy(int expert, int from, int to) {
    packing.move_copy(expert, from, to);
    record_change(slot_of(expert, from), kEmpty);
    record_change(slot_of(kEmpty, to), expert);
  }

  // Ends a step: the changes since the end of the previous step belong together.
  void end_step(Change::Kind kind, double gain) {
    for (size_t i = first_of_step_; i < changes.size(); i++)
      changes[i].step = step_, changes[i].kind = kind, changes[i].gain = gain;
    first_of_step_ = changes.size();
    step_++;
  }
  int64_t num_steps() const { return step_; }
  int64_t layer() const { return layer_; }

  Packing packing;
  std::vector<Change> changes;

 private:
  // For each expert, the node that holds most copies of its group.
  static std::vector<int> group_homes(const Problem& problem, const int64_t* current_P) {
    const int64_t group_size = problem.num_experts / problem.num_groups;
    std::vector<int> copies_DN(problem.num_groups * problem.num_nodes, 0), home_E(problem.num_experts);
    for (int64_t slot = 0; slot < problem.num_slots(); slot++) {
      const int64_t node = slot / (problem.slots_per_gpu * problem.gpus_per_node());
      if (current_P[slot] != kEmpty) copies_DN[current_P[slot] / group_size * problem.num_nodes + node]++;
    }
    for (int64_t expert = 0; expert < problem.num_experts; expert++) {
      const auto first = copies_DN.begin() + expert / group_size * problem.num_nodes;
      home_E[expert] = static_cast<int>(std::max_element(first, first + problem.num_nodes) - first);
    }
    return home_E;
  }
  int64_t slot_of(int64_t expert, int gpu) const {
    const auto first = slot_P_.begin() + gpu * per_gpu_;
    return std::find(first, first + per_gpu_, expert) - slot_P_.begin();
  }
  void record_change(int64_t slot, int64_t expert) {
    slot_P_[slot] = expert;
    changes.push_back({slot, expert, step_, Change::kRepair, 0.0});
  }

  int64_t layer_, per_gpu_;
  int gpus_per_node_;
  bool hierarchical_;
  std::vector<int64_t> slot_P_;
  std::vector<uint8_t> on_node_EN_;
  int64_t num_nodes_;
  std::vector<int> home_E_;  // empty in the global policy
  int64_t step_ = 0;
  size_t first_of_step_ = 0;
};

}  // namespace eprt::balancer
