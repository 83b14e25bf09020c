// Whole tokens from experts to GPUs under capacities: a bipartite flow along the slots.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "weights.h"

namespace eprt::balancer {

class Flow {
 public:
  // Experts with one slot are settled at once; the others are shared_experts().
  Flow(const Replicas& replicas, const std::vector<int64_t>& count_E);

  const Replicas& replicas() const { return replicas_; }
  const std::vector<int64_t>& shared_experts() const { return shared_; }
  int64_t taken(int64_t slot) const { return taken_P_[slot]; }

  void set_capacity(double time);  // of every GPU, in units of load over speed; at least what is settled
  bool settled() const;            // no GPU passes its capacity so far
  // Up to `tokens` of the expert's tokens left over go to the slot, as far as its GPU has capacity.
  void give(int64_t expert, int64_t slot, int64_t tokens);
  // The same for all its slots on a node, the least busy GPU first.
  void give_within(int64_t expert, int64_t node, int64_t tokens);
  // Everything left over, along augmenting paths where GPUs are full. What the capacities cannot hold goes beyond them;
  // false then.
  bool give_rest();

 private:
  int64_t room(int64_t gpu) const { return capacity_G_[gpu] - load_G_[gpu]; }
  int64_t roomiest(int64_t expert) const;
  bool augment(int64_t expert);
  void put(int64_t expert, int64_t slot, int64_t tokens);

  const Replicas& replicas_;
  std::vector<int64_t> left_E_, taken_P_, load_G_, capacity_G_, shared_;
  std::vector<std::vector<std::pair<int64_t, int64_t>>> shared_on_G_;  // (expert, slot)
};

// The smallest time for which whole tokens fit; at most `upper`, for which fractions do.
double smallest_time(const Replicas& replicas, const std::vector<int64_t>& count_E, double upper);

}  // namespace eprt::balancer
