#include "flow.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace eprt::balancer {

Flow::Flow(const Replicas& replicas, const std::vector<int64_t>& count_E)
    : replicas_(replicas),
      left_E_(count_E),
      taken_P_(replicas.num_slots, 0),
      load_G_(replicas.num_gpus, 0),
      capacity_G_(replicas.num_gpus, 0),
      replicated_on_G_(replicas.num_gpus) {
  for (int64_t expert = 0; expert < replicas.num_experts; expert++) {
    const int64_t first = replicas.first_E1[expert];
    if (left_E_[expert] == 0) continue;
    if (replicas.count(expert) == 1) {
      assign_tokens(expert, replicas.slot_by_expert[first], left_E_[expert]);
      continue;
    }
    replicated_.push_back(expert);
    for (int64_t i = first; i < replicas.first_E1[expert + 1]; i++)
      replicated_on_G_[replicas.gpu(replicas.slot_by_expert[i])].emplace_back(expert, replicas.slot_by_expert[i]);
  }
}

void Flow::assign_tokens(int64_t expert, int64_t slot, int64_t tokens) {
  left_E_[expert] -= tokens;
  taken_P_[slot] += tokens;
  load_G_[replicas_.gpu(slot)] += tokens;
}

void Flow::set_capacity(double time) {
  for (int64_t gpu = 0; gpu < replicas_.num_gpus; gpu++)
    capacity_G_[gpu] = static_cast<int64_t>(std::ceil(time * replicas_.speed_G[gpu] - 1e-9));
}

bool Flow::within_capacity() const {
  for (int64_t gpu = 0; gpu < replicas_.num_gpus; gpu++)
    if (load_G_[gpu] > capacity_G_[gpu]) return false;
  return true;
}

void Flow::give_tokens(int64_t expert, int64_t slot, int64_t tokens) {
  tokens = std::min({tokens, left_E_[expert], room(replicas_.gpu(slot))});
  if (tokens > 0) assign_tokens(expert, slot, tokens);
}

void Flow::give_on_node(int64_t expert, int64_t node, int64_t tokens) {
  while (tokens > 0) {
    int64_t best = -1;
    for (int64_t i = replicas_.first_E1[expert]; i < replicas_.first_E1[expert + 1]; i++) {
      const int64_t slot = replicas_.slot_by_expert[i], gpu = replicas_.gpu(slot);
      if (replicas_.node(gpu) != node || room(gpu) <= 0) continue;
      if (best < 0 || room(gpu) > room(replicas_.gpu(best))) best = slot;
    }
    if (best < 0) return;
    const int64_t given = std::min({tokens, left_E_[expert], room(replicas_.gpu(best))});
    if (given <= 0) return;
    assign_tokens(expert, best, given);
    tokens -= given;
  }
}

bool Flow::give_rest() {
  bool all = true;
  for (int64_t expert : replicated_) {
    while (left_E_[expert] > 0) {
      const int64_t slot = slot_with_most_room(expert);
      if (room(replicas_.gpu(slot)) > 0)
        give_tokens(expert, slot, left_E_[expert]);
      else if (!augment(expert))
        assign_tokens(expert, slot, left_E_[expert]), all = false;
    }
  }
  return all;
}

int64_t Flow::slot_with_most_room(int64_t expert) const {
  const int64_t* first = replicas_.slot_by_expert + replicas_.first_E1[expert];
  return *std::max_element(first, first + replicas_.count(expert),
                           [&](int64_t a, int64_t b) { return room(replicas_.gpu(a)) < room(replicas_.gpu(b)); });
}

// Breadth-first search for a GPU with room: along the slots of the expert, then of experts that can send some of their
// tokens to another of their slots.
bool Flow::augment(int64_t expert) {
  struct Hop {
    int64_t expert, from, to;  // tokens of the expert move from slot `from` (-1: they were unassigned) to slot `to`
    int64_t before;            // index of the hop that reached the GPU of `from`
  };
  std::vector<Hop> hops;
  std::vector<uint8_t> reached_G(replicas_.num_gpus, 0);
  auto reach = [&](int64_t via, int64_t from, int64_t before) {
    for (int64_t i = replicas_.first_E1[via]; i < replicas_.first_E1[via + 1]; i++) {
      const int64_t slot = replicas_.slot_by_expert[i], gpu = replicas_.gpu(slot);
      if (reached_G[gpu] || capacity_G_[gpu] == 0) continue;
      reached_G[gpu] = 1;
      hops.push_back({via, from, slot, before});
    }
  };
  reach(expert, -1, -1);
  for (size_t i = 0; i < hops.size(); i++) {
    const int64_t gpu = replicas_.gpu(hops[i].to);
    if (room(gpu) > 0) {
      int64_t tokens = std::min(room(gpu), left_E_[expert]);
      for (int64_t hop = static_cast<int64_t>(i); hop >= 0; hop = hops[hop].before)
        if (hops[hop].from >= 0) tokens = std::min(tokens, taken_P_[hops[hop].from]);
      for (int64_t hop = static_cast<int64_t>(i); hop >= 0; hop = hops[hop].before) {
        assign_tokens(hops[hop].expert, hops[hop].to, tokens);
        if (hops[hop].from >= 0) assign_tokens(hops[hop].expert, hops[hop].from, -tokens);
      }
      return true;
    }
    for (const auto& [other, slot] : replicated_on_G_[gpu])
      if (taken_P_[slot] > 0) reach(other, slot, static_cast<int64_t>(i));
  }
  return false;
}

double smallest_time(const Replicas& replicas, const std::vector<int64_t>& count_E, double upper) {
  const double total = static_cast<double>(std::accumulate(count_E.begin(), count_E.end(), int64_t{0}));
  const double speed = std::accumulate(replicas.speed_G, replicas.speed_G + replicas.num_gpus, 0.0);
  double lower = total / speed;
  const double step = 0.5 / *std::max_element(replicas.speed_G, replicas.speed_G + replicas.num_gpus);
  auto fits = [&](double time) {  // experts with one slot may exceed the capacities alone
    Flow flow(replicas, count_E);
    flow.set_capacity(time);
    return flow.within_capacity() && flow.give_rest();
  };
  if (fits(lower)) return lower;
  while (upper - lower > step) {
    const double middle = (lower + upper) / 2;
    (fits(middle) ? upper : lower) = middle;
  }
  return upper;
}

}  // namespace eprt::balancer
