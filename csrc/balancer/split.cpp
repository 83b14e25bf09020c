#include "split.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "flow.h"

namespace eprt::balancer {
namespace {

// A largest time that a fractional split can reach, close to the smallest: water-filling starting from the weights.
double reachable_time(const Replicas& replicas, const std::vector<double>& load_E) {
  std::vector<double> load_P(replicas.num_slots, 0.0);
  for (int64_t expert = 0; expert < replicas.num_experts; expert++)
    for (int64_t i = replicas.first_E1[expert]; i < replicas.first_E1[expert + 1]; i++)
      load_P[replicas.slot_by_expert[i]] = load_E[expert] * replicas.weight_P[replicas.slot_by_expert[i]];
  double speed = 0.0;
  for (int64_t gpu = 0; gpu < replicas.num_gpus; gpu++) speed += replicas.speed_G[gpu];
  const double mean = std::accumulate(load_E.begin(), load_E.end(), 0.0) / speed;
  constexpr int kSweeps = 16;
  return level_loads(replicas, load_E.data(), mean * 1.001, kSweeps, load_P.data());
}

// Splits the tokens of each slot over the sources: first the slot's own GPU, then its node, then any source.
class SourceSplit {
 public:
  SourceSplit(const Replicas& replicas, const int64_t* count_SE, int64_t only_source, int64_t* quota_SP)
      : replicas_(replicas),
        count_SE_(count_SE),
        only_source_(only_source),
        quota_SP_(quota_SP),
        left_S_(replicas.num_gpus) {}

  void split_expert(int64_t expert, const int64_t* slots, int64_t* tokens, int64_t num_slots) {
    for (int64_t source = 0; source < replicas_.num_gpus; source++)
      left_S_[source] = count_SE_[source * replicas_.num_experts + expert];
    for (int64_t i = 0; i < num_slots; i++) take_tokens(replicas_.gpu(slots[i]), slots[i], tokens[i]);
    for (int64_t i = 0; i < num_slots && replicas_.num_nodes > 1; i++) {
      const int64_t per_node = replicas_.num_gpus / replicas_.num_nodes;
      const int64_t first = replicas_.node(replicas_.gpu(slots[i])) * per_node;
      for (int64_t source = first; source < first + per_node && tokens[i] > 0; source++)
        take_tokens(source, slots[i], tokens[i]);
    }
    int64_t source = 0;
    for (int64_t i = 0; i < num_slots; i++)
      for (; tokens[i] > 0; source += left_S_[source] == 0) take_tokens(source, slots[i], tokens[i]);
  }

 private:
  void take_tokens(int64_t source, int64_t slot, int64_t& tokens) {
    const int64_t taken = std::min(tokens, left_S_[source]);
    if (taken == 0) return;
    tokens -= taken;
    left_S_[source] -= taken;
    if (only_source_ < 0)
      quota_SP_[source * replicas_.num_slots + slot] += taken;
    else if (source == only_source_)
      quota_SP_[slot] += taken;
  }

  const Replicas& replicas_;
  const int64_t* count_SE_;
  int64_t only_source_;
  int64_t* quota_SP_;
  std::vector<int64_t> left_S_;
};

// Keeps tokens on their GPU, then on their node, as far as no GPU exceeds its capacity.
void keep_local(Flow& flow, const int64_t* count_SE) {
  const Replicas& replicas = flow.replicas();
  std::vector<int64_t> left_S(replicas.num_gpus);
  for (int64_t expert : flow.replicated_experts()) {
    for (int64_t i = replicas.first_E1[expert]; i < replicas.first_E1[expert + 1]; i++) {
      const int64_t slot = replicas.slot_by_expert[i];
      flow.give_tokens(expert, slot, count_SE[replicas.gpu(slot) * replicas.num_experts + expert]);
    }
  }
  const int64_t per_node = replicas.num_gpus / replicas.num_nodes;
  for (int64_t expert : flow.replicated_experts()) {
    if (replicas.num_nodes == 1) break;
    for (int64_t node = 0; node < replicas.num_nodes; node++) {
      int64_t here = 0;  // unassigned tokens of this node
      for (int64_t gpu = node * per_node; gpu < (node + 1) * per_node; gpu++)
        here += count_SE[gpu * replicas.num_experts + expert];
      for (int64_t i = replicas.first_E1[expert]; i < replicas.first_E1[expert + 1]; i++)
        if (replicas.node(replicas.gpu(replicas.slot_by_expert[i])) == node)
          here -= flow.taken(replicas.slot_by_expert[i]);
      flow.give_on_node(expert, node, here);
    }
  }
}

}  // namespace

void split_batch(const Replicas& replicas, const int64_t* count_SE, bool exact, double slack, int64_t source,
                 int64_t* quota_SP) {
  std::vector<int64_t> count_E(replicas.num_experts, 0);
  for (int64_t s = 0; s < replicas.num_gpus; s++)
    for (int64_t expert = 0; expert < replicas.num_experts; expert++)
      count_E[expert] += count_SE[s * replicas.num_experts + expert];
  std::fill(quota_SP, quota_SP + (source < 0 ? replicas.num_gpus : 1) * replicas.num_slots, 0);
  const std::vector<double> load_E(count_E.begin(), count_E.end());
  double time = reachable_time(replicas, load_E);
  if (exact) time = smallest_time(replicas, count_E, time);
  Flow flow(replicas, count_E);
  flow.set_capacity(time * (1 + slack));
  keep_local(flow, count_SE);
  flow.give_rest();
  SourceSplit by_source(replicas, count_SE, source, quota_SP);
  std::vector<int64_t> tokens;
  for (int64_t expert = 0; expert < replicas.num_experts; expert++) {
    if (count_E[expert] == 0) continue;
    const int64_t* slots = replicas.slot_by_expert + replicas.first_E1[expert];
    tokens.clear();
    for (int64_t i = 0; i < replicas.count(expert); i++) tokens.push_back(flow.taken(slots[i]));
    by_source.split_expert(expert, slots, tokens.data(), replicas.count(expert));
  }
}

void split_by_weight(const Replicas& replicas, const int64_t* count_E, int64_t source, int64_t* quota_P) {
  std::fill(quota_P, quota_P + replicas.num_slots, 0);
  std::vector<std::pair<double, int64_t>> rest;  // (-remainder, slot), rotated by source
  for (int64_t expert = 0; expert < replicas.num_experts; expert++) {
    const int64_t num = replicas.count(expert), tokens = count_E[expert];
    const int64_t* slots = replicas.slot_by_expert + replicas.first_E1[expert];
    if (tokens == 0) continue;
    int64_t left = tokens;
    rest.clear();
    for (int64_t i = 0; i < num; i++) {
      const int64_t slot = slots[(i + source + expert) % num];
      const double exact = replicas.weight_P[slot] * static_cast<double>(tokens);
      quota_P[slot] = std::min(left, static_cast<int64_t>(std::floor(exact)));
      left -= quota_P[slot];
      rest.emplace_back(static_cast<double>(quota_P[slot]) - exact, slot);
    }
    std::stable_sort(rest.begin(), rest.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (int64_t i = 0; left > 0; i = (i + 1) % num, left--) quota_P[rest[i].second]++;
  }
}

int64_t assign(const Replicas& replicas, int64_t num_tokens, int64_t num_choices, const int64_t* expert_idx_TK,
               const int64_t* quota_P, int64_t source, int64_t* slot_idx_TK) {
  std::vector<int64_t> left_P(quota_P, quota_P + replicas.num_slots);
  std::vector<int64_t> visited_N(replicas.num_nodes, -1);  // the last token that visits each node
  const int64_t own_node = replicas.node(source);
  auto use = [&](int64_t slot, int64_t token) {
    left_P[slot]--;
    visited_N[replicas.node(replicas.gpu(slot))] = token;
    return slot;
  };
  for (int64_t token = 0; token < num_tokens; token++) {
    const int64_t* experts = expert_idx_TK + token * num_choices;
    int64_t* out = slot_idx_TK + token * num_choices;
    visited_N[own_node] = token;
    // The first pass places the choices without an alternative: they fix the nodes that the token visits.
    for (int pass = 0; pass < 2; pass++) {
      for (int64_t k = 0; k < num_choices; k++) {
        const int64_t expert = experts[k];
        if (expert < 0) {
          out[k] = -1;
          continue;
        }
        if (expert >= replicas.num_experts) return expert;
        if ((replicas.count(expert) > 1) != (pass == 1)) continue;
        int64_t best = -1, best_rank = -1;
        for (int64_t i = replicas.first_E1[expert]; i < replicas.first_E1[expert + 1]; i++) {
          const int64_t slot = replicas.slot_by_expert[i], gpu = replicas.gpu(slot);
          if (left_P[slot] <= 0) continue;
          const int64_t rank = gpu == source ? 2 : visited_N[replicas.node(gpu)] == token;
          if (best < 0 || rank > best_rank || (rank == best_rank && left_P[slot] > left_P[best]))
            best = slot, best_rank = rank;
        }
        if (best < 0) return expert;
        out[k] = use(best, token);
      }
    }
  }
  return -1;
}

}  // namespace eprt::balancer
