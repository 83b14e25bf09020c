// Packing: which GPU holds a copy of which expert, while a part of a layer is planned.
//
// A Part is what is planned together: all experts on all GPUs, or in the hierarchical policy the experts of one node's
// groups on that node's GPUs. Experts and GPUs are numbered from 0 within a part. "Time" is load divided by speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace eprt::balancer {

struct Part {
  std::vector<double> load_E;
  std::vector<int> tie_rank_E;
  std::vector<double> speed_G;
  std::vector<int> usable_G;  // slots that may be filled; 0 for a masked GPU
  int slots_per_gpu = 0;      // at least max(usable_G)
  int min_copies = 1;
  int gpus_per_node = 0;  // of the cluster, for moves that must stay inside a node

  int num_experts() const { return static_cast<int>(load_E.size()); }
  int num_gpus() const { return static_cast<int>(speed_G.size()); }
  int num_usable() const;    // usable slots of all GPUs
  int num_live() const;      // GPUs with usable slots
  double mean_time() const;  // time of every GPU under a perfect split
};

// The copies of each expert and the load of each GPU. While planning, an expert's load is split evenly over its copies;
// slot weights are chosen afterwards.
class Packing {
 public:
  explicit Packing(const Part& part);

  const Part& part() const { return *part_; }
  int count(int expert) const { return count_E_[expert]; }
  double share(int expert) const { return share_E_[expert]; }
  double share_with(int expert, int count) const { return part_->load_E[expert] / count; }
  bool holds(int gpu, int expert) const { return holds_GE_[static_cast<size_t>(gpu) * num_experts_ + expert]; }
  int num_held(int gpu) const { return static_cast<int>(experts_G_[gpu].size()); }
  int room(int gpu) const { return part_->usable_G[gpu] - num_held(gpu); }
  const std::vector<int>& experts(int gpu) const { return experts_G_[gpu]; }
  const std::vector<int>& gpus(int expert) const { return gpus_E_[expert]; }
  double load(int gpu) const { return load_G_[gpu]; }
  double time(int gpu) const { return load_G_[gpu] * inverse_speed_G_[gpu]; }
  double time_with(int gpu, double load) const { return load * inverse_speed_G_[gpu]; }
  int busiest() const;
  double max_time() const { return time(busiest()); }

  // Before packing: sets how many copies an expert will have, so that shares are final when copies are placed.
  void set_count(int expert, int count);
  void place_copy(int expert, int gpu);   // places one of the copies already counted
  void add_copy(int expert, int gpu);     // one more copy
  void remove_copy(int expert, int gpu);  // one copy fewer
  void exchange_copies(int a, int gpu_a, int b, int gpu_b);
  void move_copy(int expert, int from, int to);

 private:
  void refresh(int gpu);
  void refresh_holders(int expert);

  const Part* part_;
  int num_experts_;
  std::vector<int> count_E_;
  std::vector<double> share_E_;
  std::vector<double> load_G_, inverse_speed_G_;
  std::vector<uint8_t> holds_GE_;
  std::vector<std::vector<int>> experts_G_;  // in the order in which they were placed
  std::vector<std::vector<int>> gpus_E_;
};

// The number of copies per expert that minimises the largest share; at most one copy per GPU.
std::vector<int> replicate(const Part& part);
// Lower bound of the largest time of any even split: the mean, or the largest share on the fastest GPU.
double lower_bound(const Part& part);
// Of GPUs first_gpu .. end_gpu - 1 with room and without a copy, the one that would finish earliest; -1 if none.
int earliest_gpu(const Packing& packing, int expert, int first_gpu, int end_gpu);
// Sets the number of copies of every expert. Returns the experts in the order of packing: the largest shares first.
std::vector<int> set_counts(Packing& packing, const std::vector<int>& count_E);
// Places the largest shares first, each on the GPU that finishes earliest with it. Fills every usable slot.
Packing pack(const Part& part);
// Fills each free slot with one more copy of the expert with the largest share that the GPU does not hold.
void fill_free_slots(Packing& packing);
// kInsideNodes: only exchanges between GPUs of one node, so that every node keeps its experts.
enum class Scope { kAnywhere, kInsideNodes };
// Lowers the busiest GPU by exchanging experts and reassigning slots, until it reaches target or no move helps.
void improve(Packing& packing, double target, Scope scope = Scope::kAnywhere);

}  // namespace eprt::balancer
