// The state of one planning problem of one layer: experts, GPUs, and which GPU holds a copy of which expert.
//
// A Part is what is planned together: all experts on all GPUs, or in the hierarchical policy the experts of one node's
// groups on that node's GPUs. Experts and GPUs are numbered from 0 inside a part. "Time" is load over speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace eprt::balancer {

struct Part {
  std::vector<double> load_E;
  std::vector<int> tie_rank_E;
  std::vector<double> speed_G;
  std::vector<int> usable_G;  // 0 where masked
  int slots_per_gpu = 0;      // room in the arrays, at least max(usable_G)
  int min_copies = 1;
  int gpus_per_node = 0;  // of the cluster, for steps that must stay inside a node

  int num_experts() const { return static_cast<int>(load_E.size()); }
  int num_gpus() const { return static_cast<int>(speed_G.size()); }
  int num_usable() const;    // slots
  int num_live() const;      // GPUs with usable slots
  double mean_time() const;  // of all GPUs when load is split perfectly
};

// Copies per expert. An expert's load is split evenly over its copies while planning; slot weights come afterwards.
class Packing {
 public:
  explicit Packing(const Part& part);

  const Part& part() const { return *part_; }
  int count(int expert) const { return count_E_[expert]; }
  double share(int expert) const { return share_E_[expert]; }
  double share_with(int expert, int count) const { return part_->load_E[expert] / count; }
  bool holds(int gpu, int expert) const { return holds_GE_[static_cast<size_t>(gpu) * num_experts_ + expert]; }
  int held(int gpu) const { return static_cast<int>(experts_G_[gpu].size()); }
  int room(int gpu) const { return part_->usable_G[gpu] - held(gpu); }
  const std::vector<int>& experts(int gpu) const { return experts_G_[gpu]; }
  const std::vector<int>& gpus(int expert) const { return gpus_E_[expert]; }
  double load(int gpu) const { return load_G_[gpu]; }
  double time(int gpu) const { return load_G_[gpu] * inverse_speed_G_[gpu]; }
  double time_with(int gpu, double load) const { return load * inverse_speed_G_[gpu]; }
  int busiest() const;
  double max_time() const { return time(busiest()); }

  // Before packing: how many copies an expert will have, so that shares are final when copies are placed.
  void set_count(int expert, int count);
  void place(int expert, int gpu);   // one of the copies counted
  void add(int expert, int gpu);     // a copy more
  void remove(int expert, int gpu);  // a copy less
  void exchange(int a, int gpu_a, int b, int gpu_b);
  void move(int expert, int from, int to);

 private:
  void refresh(int gpu);
  void refresh_holders(int expert);

  const Part* part_;
  int num_experts_;
  std::vector<int> count_E_;
  std::vector<double> share_E_;
  std::vector<double> load_G_, inverse_speed_G_;
  std::vector<uint8_t> holds_GE_;
  std::vector<std::vector<int>> experts_G_;  // ascending by when they came
  std::vector<std::vector<int>> gpus_E_;
};

// Copies per expert so that the largest share is as small as it can be, none with more copies than GPUs.
std::vector<int> replicate(const Part& part);
// The best that any even split can reach: the mean, or the largest share over the fastest GPU.
double lower_bound(const Part& part);
// Largest copies first, each onto the GPU that is done earliest with it; every usable slot is filled.
Packing pack(const Part& part);
// Slots still free get a copy more of the busiest expert that their GPU lacks.
void fill_free_slots(Packing& packing);
// Exchanges and changes of copies that lower the busiest GPU, until target or until none is left. kInsideNodes: only
// exchanges between GPUs of one node, which leave every node with the experts it has.
enum class Scope { kAnywhere, kInsideNodes };
void improve(Packing& packing, double target, Scope scope = Scope::kAnywhere);

}  // namespace eprt::balancer
