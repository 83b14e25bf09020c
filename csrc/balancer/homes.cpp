#include "homes.h"

#include <algorithm>
#include <numeric>

namespace eprt::balancer {

Incidence::Incidence(const Tokens& tokens, int num_experts) : tokens_E(num_experts), experts_T(tokens.num_tokens) {
  for (int64_t token = 0; token < tokens.num_tokens; token++) {
    auto& experts = experts_T[token];
    for (int64_t k = 0; k < tokens.num_choices; k++) {
      const int expert = tokens.topk_TK[token * tokens.num_choices + k];
      if (expert < 0 || std::find(experts.begin(), experts.end(), expert) != experts.end()) continue;
      experts.push_back(expert);
      tokens_E[expert].push_back(static_cast<int>(token));
    }
  }
}

namespace {

class Refiner {
 public:
  Refiner(const Problem& problem, int64_t layer, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
          const NodeLimits& limits, std::vector<int> home_E)
      : num_experts_(static_cast<int>(problem.num_experts)),
        num_nodes_(static_cast<int>(problem.num_nodes)),
        load_E_(problem.load_E(layer)),
        tokens_(tokens),
        incidence_(incidence),
        traffic_(traffic),
        limits_(limits),
        home_E_(std::move(home_E)),
        load_N_(num_nodes_, 0.0),
        used_TN_(tokens.num_tokens * num_nodes_, 0),
        leave_E_(num_experts_),
        enter_EN_(static_cast<size_t>(num_experts_) * num_nodes_),
        mark_T_(tokens.num_tokens, -1) {
    for (int expert = 0; expert < num_experts_; expert++) {
      load_N_[home_E_[expert]] += load_E_[expert];
      for (int token : incidence.tokens_E[expert]) used(token, home_E_[expert])++;
    }
  }

  std::vector<int> run(int max_passes) {
    constexpr double kWorthwhile = 2e-3;  // crossings per token that a pass must save
    const double all_tokens = tokens_.total_weight();
    for (int pass = 0; pass < max_passes && one_pass() > kWorthwhile * all_tokens; pass++) {
    }
    return std::move(home_E_);
  }

 private:
  struct Swap {
    double gain;
    int a, b;
  };

  uint8_t& used(int token, int node) { return used_TN_[static_cast<size_t>(token) * num_nodes_ + node]; }
  // The token's cost of visiting the node.
  double visit_cost(int token, int node) const {
    return tokens_.node_T && tokens_.node_T[token] == node ? 0.0 : tokens_.weight(token);
  }

  // Whether an expert on a node costs the token a crossing when `others` of its experts are there too.
  bool crosses(int others) const { return others == 0 || traffic_ == Traffic::kExpertMessages; }

  // For each expert, the cost saved by leaving its home and the cost added by moving to each node, all else unchanged.
  void measure_moves() {
    std::fill(leave_E_.begin(), leave_E_.end(), 0.0);
    std::fill(enter_EN_.begin(), enter_EN_.end(), 0.0);
    for (int expert = 0; expert < num_experts_; expert++) {
      double* enter_N = &enter_EN_[static_cast<size_t>(expert) * num_nodes_];
      const int home = home_E_[expert];
      for (int token : incidence_.tokens_E[expert]) {
        if (crosses(used(token, home) - 1)) leave_E_[expert] += visit_cost(token, home);
        const uint8_t* used_N = &used(token, 0);
        const double weight = tokens_.weight(token);
        for (int node = 0; node < num_nodes_; node++) enter_N[node] += crosses(used_N[node]) ? weight : 0.0;
        if (!tokens_.node_T) continue;
        const int own = tokens_.node_T[token];
        enter_N[own] -= crosses(used_N[own]) ? weight : 0.0;
      }
    }
  }

  // Skips tokens of both experts: their nodes do not change.
  double gain_of_move(int expert, int from, int to, int other) {
    double gain = 0.0;
    for (int token : incidence_.tokens_E[expert]) {
      if (mark_T_[token] == other) continue;
      if (crosses(used(token, from) - 1)) gain += visit_cost(token, from);
      if (crosses(used(token, to))) gain -= visit_cost(token, to);
    }
    return gain;
  }

  double exact_gain(int a, int b) {
    for (int token : incidence_.tokens_E[b]) mark_T_[token] = b;
    double gain = gain_of_move(a, home_E_[a], home_E_[b], b);
    for (int token : incidence_.tokens_E[b]) mark_T_[token] = -1;
    for (int token : incidence_.tokens_E[a]) mark_T_[token] = a;
    gain += gain_of_move(b, home_E_[b], home_E_[a], a);
    for (int token : incidence_.tokens_E[a]) mark_T_[token] = -1;
    return gain;
  }

  double overload(int node, double load) const { return std::max(0.0, load - limits_.load_N[node]); }

  // How much the swap reduces the overload of the two nodes; negative if it increases it.
  double relief(int a, int b) const {
    const int node_a = home_E_[a], node_b = home_E_[b];
    const double shift = load_E_[a] - load_E_[b];
    return overload(node_a, load_N_[node_a]) + overload(node_b, load_N_[node_b]) -
           overload(node_a, load_N_[node_a] - shift) - overload(node_b, load_N_[node_b] + shift);
  }

  void swap_homes(int a, int b) {
    const int node_a = home_E_[a], node_b = home_E_[b];
    for (int token : incidence_.tokens_E[a]) used(token, node_a)--, used(token, node_b)++;
    for (int token : incidence_.tokens_E[b]) used(token, node_b)--, used(token, node_a)++;
    load_N_[node_a] += load_E_[b] - load_E_[a];
    load_N_[node_b] += load_E_[a] - load_E_[b];
    std::swap(home_E_[a], home_E_[b]);
  }

  // Ranks all pairs by the estimates of measure_moves(), then swaps in that order each pair whose exact gain is
  // positive. Returns the sum of the gains.
  double one_pass() {
    measure_moves();
    std::vector<Swap> swaps;
    const double scale = static_cast<double>(tokens_.num_tokens) /
                         std::max(1e-300, std::accumulate(load_N_.begin(), load_N_.end(), 0.0));
    for (int a = 0; a < num_experts_; a++) {
      for (int b = a + 1; b < num_experts_; b++) {
        const int node_a = home_E_[a], node_b = home_E_[b];
        if (node_a == node_b) continue;
        const double gain = leave_E_[a] - enter_EN_[static_cast<size_t>(a) * num_nodes_ + node_b] + leave_E_[b] -
                            enter_EN_[static_cast<size_t>(b) * num_nodes_ + node_a];
        const double eased = relief(a, b);
        if (eased < 0 || (gain <= 0 && eased <= 0)) continue;
        swaps.push_back({gain + kOverloadWeight * eased * scale, a, b});
      }
    }
    const size_t kept = std::min<size_t>(swaps.size(), 4 * static_cast<size_t>(num_experts_));
    std::partial_sort(swaps.begin(), swaps.begin() + static_cast<int64_t>(kept), swaps.end(),
                      [](const Swap& x, const Swap& y) {
                        return x.gain != y.gain ? x.gain > y.gain : x.a != y.a ? x.a < y.a : x.b < y.b;
                      });
    double saved = 0.0;
    for (size_t i = 0; i < kept; i++) {
      const auto [promise, a, b] = swaps[i];
      if (home_E_[a] == home_E_[b]) continue;
      const double eased = relief(a, b);
      if (eased < 0) continue;
      const double gain = exact_gain(a, b) + kOverloadWeight * eased * scale;
      if (gain <= 1e-9) continue;
      swap_homes(a, b);
      saved += gain;
    }
    return saved;
  }

  // Crossings that one token of overload outweighs: large, because an overloaded node cannot be balanced later.
  static constexpr double kOverloadWeight = 16.0;

  int num_experts_, num_nodes_;
  const double* load_E_;
  const Tokens& tokens_;
  const Incidence& incidence_;
  Traffic traffic_;
  const NodeLimits& limits_;
  std::vector<int> home_E_;
  std::vector<double> load_N_;
  std::vector<uint8_t> used_TN_;  // how many of the token's experts have their home on the node
  std::vector<double> leave_E_, enter_EN_;
  std::vector<int> mark_T_;
};

}  // namespace

std::vector<int> refine_homes(const Problem& problem, int64_t layer, const Tokens& tokens, const Incidence& incidence,
                              Traffic traffic, const NodeLimits& limits, int max_passes, std::vector<int> start) {
  return Refiner(problem, layer, tokens, incidence, traffic, limits, std::move(start)).run(max_passes);
}

std::vector<int> cluster_homes(const Problem& problem, int64_t layer, const Tokens& tokens, const Incidence& incidence,
                               const NodeLimits& limits) {
  const int num_experts = static_cast<int>(problem.num_experts);
  const double* load_E = problem.load_E(layer);
  std::vector<int> home_E(num_experts, -1);
  for (int node = 0; node < static_cast<int>(problem.num_nodes); node++) {
    std::vector<double> together_E(num_experts, 0.0);
    double load = 0.0;
    for (int i = 0; i < limits.experts_N[node]; i++) {
      int best = -1;
      bool best_fits = false;
      for (int expert = 0; expert < num_experts; expert++) {
        if (home_E[expert] >= 0) continue;
        const bool fits = load + load_E[expert] <= limits.load_N[node];
        const bool better =
            best < 0 || (fits != best_fits                        ? fits
                         : together_E[expert] != together_E[best] ? together_E[expert] > together_E[best]
                                                                  : load_E[expert] > load_E[best]);
        if (better) best = expert, best_fits = fits;
      }
      home_E[best] = node;
      load += load_E[best];
      for (int token : incidence.tokens_E[best])
        for (int other : incidence.experts_T[token]) together_E[other] += tokens.weight(token);
    }
  }
  return home_E;
}

}  // namespace eprt::balancer
