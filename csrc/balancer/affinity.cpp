#include "affinity.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "annealing.h"
#include "copy_gains.h"
#include "homes.h"
#include "plan.h"
#include "weights.h"

namespace eprt::balancer {
namespace {

std::vector<uint64_t> home_masks(const std::vector<int>& home_E) {
  std::vector<uint64_t> mask_E;
  for (int home : home_E) mask_E.push_back(uint64_t{1} << home);
  return mask_E;
}

// Homes in proportion to each node's slots, load in proportion to its speed.
NodeLimits node_limits(const Problem& problem, int64_t layer, double allowance) {
  const int num_nodes = static_cast<int>(problem.num_nodes);
  std::vector<int> usable_N(num_nodes, 0);
  std::vector<double> speed_N(num_nodes, 0.0);
  for (int64_t gpu = 0; gpu < problem.num_gpus; gpu++) {
    const int usable = problem.usable(layer, gpu);
    usable_N[gpu / problem.gpus_per_node()] += usable;
    if (usable > 0) speed_N[gpu / problem.gpus_per_node()] += problem.speed_G[gpu];
  }
  const double* load_E = problem.load_E(layer);
  const double load = std::accumulate(load_E, load_E + problem.num_experts, 0.0);
  const double speed = std::accumulate(speed_N.begin(), speed_N.end(), 0.0);
  const int64_t usable = std::accumulate(usable_N.begin(), usable_N.end(), int64_t{0});
  NodeLimits limits;
  for (int node = 0; node < num_nodes; node++) {
    limits.experts_N.push_back(static_cast<int>(problem.num_experts * usable_N[node] / usable));
    limits.load_N.push_back(load / speed * speed_N[node] * (1 + std::min(allowance, 0.3)));
  }
  int left =
      static_cast<int>(problem.num_experts) - std::accumulate(limits.experts_N.begin(), limits.experts_N.end(), 0);
  for (int node = 0; left > 0; node = (node + 1) % num_nodes)
    if (limits.experts_N[node] < usable_N[node]) limits.experts_N[node]++, left--;
  return limits;
}

std::vector<int> choose_homes(const Problem& problem, int64_t layer, const Tokens& tokens, const Incidence& incidence,
                              Traffic traffic, const NodeLimits& limits) {
  constexpr int kFirstPasses = 3, kMaxPasses = 24;
  auto refined = [&](int passes, std::vector<int> start) {
    return refine_homes(problem, layer, tokens, incidence, traffic, limits, passes, std::move(start));
  };
  std::vector<int> start = cluster_homes(problem, layer, tokens, incidence, limits);
  if (!problem.hierarchical) return refined(kMaxPasses, std::move(start));
  // With group-limited routing a token's experts are of few groups, so whole groups are a second start. A few passes
  // show which start is better.
  double unused = 0.0;
  const std::vector<int> node_of_group = groups_to_nodes(problem, layer, &unused);
  std::vector<int> groups_E(problem.num_experts), size_N(problem.num_nodes, 0);
  for (int64_t expert = 0; expert < problem.num_experts; expert++)
    size_N[groups_E[expert] = node_of_group[expert / (problem.num_experts / problem.num_groups)]]++;
  if (size_N != limits.experts_N) return refined(kMaxPasses, std::move(start));
  auto crossings = [&](const std::vector<int>& homes) {
    return count_traffic(tokens, traffic, problem.num_nodes, home_masks(homes).data());
  };
  start = refined(kFirstPasses, std::move(start));
  groups_E = refined(kFirstPasses, std::move(groups_E));
  if (crossings(groups_E) < crossings(start)) start = std::move(groups_E);
  return refined(kMaxPasses, std::move(start));
}

// A node's mean time may reach this fraction of the cap: above it, its copies seldom pack below the cap.
constexpr double kUnderCap = 0.985;

// Decides how many copies of each expert each node gets.
class CopyPlanner {
 public:
  CopyPlanner(const Problem& problem, const Part& part, const Tokens& tokens, const Incidence& incidence,
              Traffic traffic, const std::vector<int>& home_E, double cap)
      : part_(part),
        num_nodes_(static_cast<int>(problem.num_nodes)),
        cap_(cap),
        gains_(problem, tokens, incidence, traffic, home_masks(home_E)),
        copies_{num_nodes_, std::vector<int>(static_cast<size_t>(part.num_experts()) * num_nodes_, 0),
                std::vector<int>(part.num_experts(), 1), std::vector<int>(part.num_experts(), 1)},
        room_N_(problem.num_nodes, 0),
        live_N_(problem.num_nodes, 0),
        load_N_(problem.num_nodes, 0.0),
        speed_N_(problem.num_nodes, 0.0) {
    for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
      const int node = gpu / part.gpus_per_node;
      room_N_[node] += part.usable_G[gpu];
      live_N_[node] += part.usable_G[gpu] > 0;
      if (part.usable_G[gpu] > 0) speed_N_[node] += part.speed_G[gpu];
    }
    for (int expert = 0; expert < part.num_experts(); expert++) {
      copies_.at(expert, home_E[expert]) = 1;
      room_N_[home_E[expert]]--;
      load_N_[home_E[expert]] += part.load_E[expert];
    }
  }

  const NodeCopies& copies() const { return copies_; }

  // Adds the copies without which no packing meets the cap: for experts with too large a share, and for the minimum
  // number of copies. Returns false if no slot is left for the latter.
  bool add_needed(double largest_share) {
    for (;;) {
      int worst = -1;
      for (int expert = 0; expert < part_.num_experts(); expert++)
        if (share(expert) > largest_share && count(expert) < part_.num_live() &&
            (worst < 0 || share(expert) > share(worst)))
          worst = expert;
      if (worst < 0 || !add_where_best(worst)) break;
    }
    for (int expert = 0; expert < part_.num_experts(); expert++)
      while (count(expert) < part_.min_copies && add_where_best(expert)) {
      }
    copies_.min_E = copies_.count_E;
    return *std::min_element(copies_.count_E.begin(), copies_.count_E.end()) >= part_.min_copies;
  }

  // Uses the remaining slots for the copies that save most traffic and keep the nodes' loads under the cap.
  void add_useful() {
    for (;;) {
      int best_expert = -1, best_node = -1;
      double best_gain = 1e-9;
      for (int expert = 0; expert < part_.num_experts(); expert++)
        for (int node = 0; node < num_nodes_; node++)
          if (room_N_[node] > 0 && gains_.gain(expert, node) > best_gain && copies_on(expert, node) == 0 &&
              fits(expert, node))
            best_expert = expert, best_node = node, best_gain = gains_.gain(expert, node);
      if (best_expert < 0) return;
      add_copy(best_expert, best_node);
    }
  }

  // Improves homes and further copies together.
  void anneal_copies(const Tokens& tokens, const Incidence& incidence, Traffic traffic, double work, uint64_t seed) {
    std::vector<double> limit_N;
    for (double speed : speed_N_)
      limit_N.push_back(std::max(part_.mean_time() * kCloseEnough, cap_ * kUnderCap) * speed);
    for (int rank : part_.tie_rank_E) seed = seed * 0x5851f42d4c957f2d + static_cast<uint64_t>(rank) + 1;
    anneal(part_, tokens, incidence, traffic, limit_N, work, seed, copies_);
  }

 private:
  int count(int expert) const { return copies_.count_E[expert]; }
  int copies_on(int expert, int node) const { return copies_.at(expert, node); }
  double share(int expert) const { return part_.load_E[expert] / count(expert); }

  bool fits(int expert, int node) const {
    return load_N_[node] + part_.load_E[expert] / (count(expert) + 1) <= cap_ * speed_N_[node];
  }

  bool add_where_best(int expert) {
    int best = -1;
    for (int node = 0; node < num_nodes_; node++) {
      if (room_N_[node] <= 0 || copies_on(expert, node) >= live_N_[node]) continue;
      if (best < 0 || better_node(expert, node, best)) best = node;
    }
    if (best >= 0) add_copy(expert, best);
    return best >= 0;
  }

  bool better_node(int expert, int node, int than) const {
    const bool fresh = copies_on(expert, node) == 0, than_fresh = copies_on(expert, than) == 0;
    if (fresh != than_fresh) return fresh;
    const double gain = fresh ? gains_.gain(expert, node) : 0.0, than_gain = fresh ? gains_.gain(expert, than) : 0.0;
    if (gain != than_gain) return gain > than_gain;
    return load_N_[node] * speed_N_[than] < load_N_[than] * speed_N_[node];
  }

  void add_copy(int expert, int node) {
    const double before = share(expert);
    copies_.count_E[expert]++;
    for (int other = 0; other < num_nodes_; other++)
      load_N_[other] += copies_on(expert, other) * (share(expert) - before);
    load_N_[node] += share(expert);
    room_N_[node]--;
    if (copies_.at(expert, node)++ == 0) gains_.add_copy(expert, node);
  }

  const Part& part_;
  int num_nodes_;
  double cap_;
  CopyGains gains_;
  NodeCopies copies_;
  std::vector<int> room_N_, live_N_;
  std::vector<double> load_N_, speed_N_;
};

// Packs each node's copies onto its GPUs, the largest shares first. Returns false if they do not fit.
bool pack_nodes(Packing& packing, const NodeCopies& copies) {
  const Part& part = packing.part();
  for (int expert : set_counts(packing, copies.count_E)) {
    for (int first = 0; first < part.num_gpus(); first += part.gpus_per_node) {
      for (int copy = 0; copy < copies.at(expert, first / part.gpus_per_node); copy++) {
        const int gpu = earliest_gpu(packing, expert, first, first + part.gpus_per_node);
        if (gpu < 0) return false;
        packing.place_copy(expert, gpu);
      }
    }
  }
  fill_free_slots(packing);
  return true;
}

// Budget of token evaluations, which bounds the time. It grows with tokens and experts up to what 58 layers can use in
// one second on two cores; a plan of fewer layers may spend more on each.
double annealing_work(const Problem& problem, const Tokens& tokens) {
  const double wanted = 128.0 * static_cast<double>(tokens.num_tokens * problem.num_experts);
  const double most = (problem.num_nodes <= 4 ? 7e6 : 4e6) / static_cast<double>(problem.num_nodes);
  return std::min(wanted, most * std::clamp(58.0 / static_cast<double>(problem.num_layers), 1.0, 8.0));
}

// Places each node's copies in the layer's slots and fills the weights. Returns false if the largest time exceeds cap.
bool place_copies(const Problem& problem, int64_t layer, const Part& part, const NodeCopies& copies, double cap,
                  int64_t* slot_P, double* weight_P) {
  std::vector<int> all(part.num_experts());
  std::iota(all.begin(), all.end(), 0);
  Packing packing(part);
  if (!pack_nodes(packing, copies)) return false;
  improve(packing, part.mean_time() * kCloseEnough, Scope::kInsideNodes);
  auto fill = [&] {
    write_slots(packing, all, 0, slot_P);
    return fill_weights(problem, layer, slot_P, part.mean_time() * kCloseEnough, false, weight_P);
  };
  if (fill() <= cap) return true;
  improve(packing, cap);
  return fill() <= cap;
}

// The largest GPU time under these weights.
double largest_time(const Problem& problem, int64_t layer, const int64_t* slot_P, const double* weight_P) {
  const double* load_E = problem.load_E(layer);
  double largest = 0.0;
  for (int64_t gpu = 0; gpu < problem.num_gpus; gpu++) {
    double load = 0.0;
    for (int64_t slot = gpu * problem.slots_per_gpu; slot < (gpu + 1) * problem.slots_per_gpu; slot++)
      if (slot_P[slot] >= 0) load += load_E[slot_P[slot]] * weight_P[slot];
    if (problem.speed_G[gpu] > 0) largest = std::max(largest, load / problem.speed_G[gpu]);
  }
  return largest;
}

}  // namespace

void node_masks(const Problem& problem, const int64_t* slot_P, uint64_t* mask_E) {
  std::fill(mask_E, mask_E + problem.num_experts, 0);
  const int64_t per_node = problem.slots_per_gpu * problem.gpus_per_node();
  for (int64_t slot = 0; slot < problem.num_slots(); slot++)
    if (slot_P[slot] >= 0) mask_E[slot_P[slot]] |= uint64_t{1} << (slot / per_node);
}

double plan_for_traffic(const Problem& problem, int64_t layer, const Tokens& tokens, Traffic traffic, double allowance,
                        int64_t* slot_P, double* weight_P) {
  if (problem.num_nodes > 64) throw std::invalid_argument("traffic can be planned for at most 64 nodes");
  const double bound = plan_layer(problem, layer, slot_P, weight_P);
  std::vector<uint64_t> mask_E(problem.num_experts);
  node_masks(problem, slot_P, mask_E.data());
  double fewest = count_traffic(tokens, traffic, problem.num_nodes, mask_E.data());
  const double cap = (1 + allowance) * largest_time(problem, layer, slot_P, weight_P);
  if (problem.num_nodes == 1 || tokens.num_tokens == 0 || cap == 0.0) return bound;
  std::vector<int64_t> other_P(problem.num_slots());
  std::vector<double> other_weight_P(problem.num_slots());
  const Part part = whole_layer(problem, layer);
  auto consider = [&](const NodeCopies& copies) {
    if (!place_copies(problem, layer, part, copies, cap, other_P.data(), other_weight_P.data())) return;
    node_masks(problem, other_P.data(), mask_E.data());
    const double crossings = count_traffic(tokens, traffic, problem.num_nodes, mask_E.data());
    if (crossings >= fewest) return;
    fewest = crossings;
    std::copy(other_P.begin(), other_P.end(), slot_P);
    std::copy(other_weight_P.begin(), other_weight_P.end(), weight_P);
  };
  const Incidence incidence(tokens, part.num_experts());
  const NodeLimits limits = node_limits(problem, layer, allowance);
  const std::vector<int> home_E = choose_homes(problem, layer, tokens, incidence, traffic, limits);
  CopyPlanner planner(problem, part, tokens, incidence, traffic, home_E, cap);
  const std::vector<int> greedy_E = replicate(part);
  double largest_share = 0.35 * part.mean_time() * *std::max_element(part.speed_G.begin(), part.speed_G.end());
  for (int expert = 0; expert < part.num_experts(); expert++)
    largest_share = std::max(largest_share, part.load_E[expert] / greedy_E[expert]);
  if (!planner.add_needed(largest_share)) return bound;
  planner.add_useful();
  consider(planner.copies());
  if (problem.num_nodes <= kMaxNodesInSets) {
    planner.anneal_copies(tokens, incidence, traffic, annealing_work(problem, tokens), static_cast<uint64_t>(layer));
    consider(planner.copies());
  }
  return bound;
}

}  // namespace eprt::balancer
