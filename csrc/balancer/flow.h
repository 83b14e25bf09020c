// Flow: assigns whole tokens of experts to GPUs with capacities, as a bipartite flow along the slots.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "weights.h"

namespace eprt::balancer {

class Flow {
 public:
  // Assigns the tokens of experts with a single slot at once; the other experts are replicated_experts().
  Flow(const Replicas& replicas, const std::vector<int64_t>& count_E);

  const Replicas& replicas() const { return replicas_; }
  const std::vector<int64_t>& replicated_experts() const { return replicated_; }
  int64_t taken(int64_t slot) const { return taken_P_[slot]; }

  void set_capacity(double time);  // of every GPU, in units of load over speed
  bool within_capacity() const;    // no GPU exceeds its capacity so far
  // Assigns up to `tokens` of the expert's unassigned tokens to the slot, as far as its GPU has capacity.
  void give_tokens(int64_t expert, int64_t slot, int64_t tokens);
  // The same for all of the expert's slots on a node, the GPU with most capacity left first.
  void give_on_node(int64_t expert, int64_t node, int64_t tokens);
  // Assigns all remaining tokens, along augmenting paths where GPUs are full. Returns false if capacities are exceeded.
  bool give_rest();

 private:
  int64_t room(int64_t gpu) const { return capacity_G_[gpu] - load_G_[gpu]; }
  int64_t slot_with_most_room(int64_t expert) const;
  bool augment(int64_t expert);
  void assign_tokens(int64_t expert, int64_t slot, int64_t tokens);

  const Replicas& replicas_;
  std::vector<int64_t> left_E_, taken_P_, load_G_, capacity_G_, replicated_;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> replicated_on_G_;  // (expert, slot)
};

// The smallest time for which whole tokens fit. upper: a time for which fractional tokens fit.
double smallest_time(const Replicas& replicas, const std::vector<int64_t>& count_E, double upper);

}  // namespace eprt::balancer
