#include "annealing.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace eprt::balancer {
namespace {

constexpr double kTemperature = 4e-4;  // initial temperature, in crossings per token
constexpr double kOverload = 6.0;  // penalty for exceeding a node's limit by a node's mean load, in crossings per token

class Random {  // splitmix64
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  size_t below(size_t limit) { return (next() >> 32) * limit >> 32; }
  double unit() { return (static_cast<double>(next() >> 11) + 1) * 0x1p-53; }  // in (0, 1]

 private:
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  uint64_t state_;
};

// Crossings of all tokens, updated while the nodes of single experts change.
template <int kWords>
class Crossings {
 public:
  Crossings(const Tokens& tokens, const Incidence& incidence, const NodeCopies& copies)
      : tokens_(tokens),
        incidence_(incidence),
        sets_(NodeSets<kWords>::for_nodes(copies.num_nodes)),
        no_expert_(copies.count_E.size()),
        choice_TK_(tokens.num_tokens * tokens.num_choices, static_cast<int>(no_expert_)),
        covering_E_(no_expert_ + 1, sets_.all()),
        cost_T_(tokens.num_tokens),
        seen_T_(tokens.num_tokens, 0) {
    for (size_t expert = 0; expert < no_expert_; expert++)
      covering_E_[expert] = sets_.covering(copies.mask(static_cast<int>(expert)));
    for (int64_t token = 0; token < tokens.num_tokens; token++) {
      for (size_t k = 0; k < incidence.experts_T[token].size(); k++)
        choice_TK_[token * tokens.num_choices + k] = incidence.experts_T[token][k];
      cost_T_[token] = cost(token);
    }
  }

  // Crossings saved if experts a and b (-1: none) move to these nodes. Must be followed by accept() or reject().
  double propose(int a, uint64_t mask_a, int b, uint64_t mask_b) {
    moved_ = {a, b};
    changed_.clear();
    for (int i = 0; i < 2; i++) {
      if (moved_[i] < 0) continue;
      before_[i] = covering_E_[moved_[i]];
      covering_E_[moved_[i]] = sets_.covering(i ? mask_b : mask_a);
    }
    double saved = 0.0;
    round_++;
    for (int expert : moved_) {
      if (expert < 0) continue;
      for (int token : incidence_.tokens_E[expert]) {
        if (seen_T_[token] == round_) continue;
        seen_T_[token] = round_;
        const auto now = static_cast<float>(cost(token));
        if (now == cost_T_[token]) continue;
        changed_.push_back({token, now});
        saved += cost_T_[token] - now;
      }
      evaluations_ += static_cast<double>(incidence_.tokens_E[expert].size());
    }
    return saved;
  }
  void accept() {
    for (const auto& [token, cost] : changed_) cost_T_[token] = cost;
  }
  void reject() {
    for (int i = 0; i < 2; i++)
      if (moved_[i] >= 0) covering_E_[moved_[i]] = before_[i];
  }
  double evaluations() const { return evaluations_; }  // of tokens

 private:
  double cost(int64_t token) const {
    auto covers = sets_.all();
    const int* choice_K = &choice_TK_[token * tokens_.num_choices];
    for (int64_t k = 0; k < tokens_.num_choices; k++) sets_.intersect(covers, covering_E_[choice_K[k]]);
    return tokens_.weight(token) * sets_.visits(covers, tokens_.node_T ? tokens_.node_T[token] : -1);
  }

  struct Changed {
    int token;
    float cost;
  };
  const Tokens& tokens_;
  const Incidence& incidence_;
  const NodeSets<kWords>& sets_;
  size_t no_expert_;
  std::vector<int> choice_TK_;  // no_expert_ pads tokens with fewer choices
  std::vector<typename NodeSets<kWords>::Bits> covering_E_;
  std::vector<float> cost_T_;
  std::vector<int> seen_T_;  // the last round in which the token was recounted
  int round_ = 0;
  std::array<int, 2> moved_{};
  std::array<typename NodeSets<kWords>::Bits, 2> before_{};
  std::vector<Changed> changed_;
  double evaluations_ = 0.0;
};

// The same for expert messages: an expert's tokens cross from every node without a copy of it.
class Messages {
 public:
  Messages(const Tokens& tokens, const Incidence& incidence, const NodeCopies& copies)
      : num_nodes_(copies.num_nodes), from_EN_(copies.copies_EN.size(), 0.0), mask_E_(copies.count_E.size(), 0) {
    for (size_t expert = 0; expert < mask_E_.size(); expert++) {
      for (int token : incidence.tokens_E[expert])
        for (int node = 0; node < num_nodes_; node++)
          from_EN_[expert * num_nodes_ + node] +=
              tokens.weight(token) * (tokens.node_T ? tokens.node_T[token] == node : 1.0 / num_nodes_);
      mask_E_[expert] = copies.mask(static_cast<int>(expert));
    }
  }

  double propose(int a, uint64_t mask_a, int b, uint64_t mask_b) {
    moved_ = {a, b}, masks_ = {mask_a, mask_b};
    evaluations_ += 200;
    return saved(a, mask_a) + (b < 0 ? 0.0 : saved(b, mask_b));
  }
  void accept() {
    for (int i = 0; i < 2; i++)
      if (moved_[i] >= 0) mask_E_[moved_[i]] = masks_[i];
  }
  void reject() {}
  double evaluations() const { return evaluations_; }

 private:
  double saved(int expert, uint64_t mask) const {
    double sum = 0.0;
    for (int node = 0; node < num_nodes_; node++)
      sum += from_EN_[static_cast<size_t>(expert) * num_nodes_ + node] *
             (static_cast<int>(mask >> node & 1) - static_cast<int>(mask_E_[expert] >> node & 1));
    return sum;
  }

  int num_nodes_;
  std::vector<double> from_EN_;  // weight of the expert's tokens on each node
  std::vector<uint64_t> mask_E_;
  std::array<int, 2> moved_{};
  std::array<uint64_t, 2> masks_{};
  double evaluations_ = 0.0;
};

template <typename Cost>
class Annealer {
 public:
  Annealer(const Part& part, const Tokens& tokens, const Incidence& incidence, const std::vector<double>& limit_N,
           uint64_t seed, NodeCopies& copies)
      : part_(part),
        limit_N_(limit_N),
        copies_(copies),
        cost_(tokens, incidence, copies),
        random_(seed),
        held_N_(copies.num_nodes),
        load_N_(copies.num_nodes, 0.0) {
    const double all_tokens = tokens.total_weight();
    double load = 0.0;
    for (int expert = 0; expert < part.num_experts(); expert++) {
      load += part.load_E[expert];
      for (int node = 0; node < copies.num_nodes; node++) {
        load_N_[node] += copies.at(expert, node) * share(expert);
        if (copies.at(expert, node) == 1) held_N_[node].push_back(expert);
      }
    }
    temperature_ = kTemperature * all_tokens;
    overload_cost_ = load > 0 ? kOverload * all_tokens * copies.num_nodes / load : 0.0;
  }

  void run(double work) {
    for (double tries = 0; cost_.evaluations() + tries < work; tries += 16) {  // impossible moves cost time too
      // Metropolis criterion: the loss accepted for this move; the temperature falls linearly.
      const double allowed_loss = -temperature_ * (1 - (cost_.evaluations() + tries) / work) * std::log(random_.unit());
      const int here = static_cast<int>(random_.below(copies_.num_nodes));
      const int there = (here + 1 + static_cast<int>(random_.below(copies_.num_nodes - 1))) % copies_.num_nodes;
      if (held_N_[here].empty() || held_N_[there].empty()) continue;
      const size_t at = random_.below(held_N_[here].size()), other_at = random_.below(held_N_[there].size());
      const int leaving = held_N_[here][at], entering = held_N_[there][other_at];
      if (copies_.at(entering, here) > 0) continue;
      if (copies_.at(leaving, there) > 0 || random_.below(2))
        try_replace(here, at, leaving, entering, allowed_loss);
      else
        try_exchange(here, at, leaving, there, other_at, entering, allowed_loss);
    }
  }

 private:
  double share(int expert) const { return part_.load_E[expert] / copies_.count_E[expert]; }
  double overload() const {
    double sum = 0.0;
    for (int node = 0; node < copies_.num_nodes; node++) sum += std::max(0.0, load_N_[node] - limit_N_[node]);
    return sum;
  }
  void change_count(int expert, int node, int more) {
    for (int one = 0; one < copies_.num_nodes; one++) load_N_[one] -= copies_.at(expert, one) * share(expert);
    copies_.at(expert, node) += more;
    copies_.count_E[expert] += more;
    for (int one = 0; one < copies_.num_nodes; one++) load_N_[one] += copies_.at(expert, one) * share(expert);
  }

  // Replaces the copy of `leaving` on node `here`, if it has copies to spare, by one more copy of `entering`.
  void try_replace(int here, size_t at, int leaving, int entering, double allowed_loss) {
    if (copies_.count_E[leaving] <= copies_.min_E[leaving] || copies_.count_E[entering] >= part_.num_live()) return;
    const double before = overload();
    change_count(leaving, here, -1);
    change_count(entering, here, 1);
    const double eased = (before - overload()) * overload_cost_;
    if (eased + cost_.propose(leaving, copies_.mask(leaving), entering, copies_.mask(entering)) >= -allowed_loss) {
      cost_.accept();
      held_N_[here][at] = entering;
      return;
    }
    cost_.reject();
    change_count(entering, here, -1);
    change_count(leaving, here, 1);
  }

  // Exchanges the copy of `leaving` on node `here` with the copy of `entering` on node `there`.
  void try_exchange(int here, size_t at, int leaving, int there, size_t other_at, int entering, double allowed_loss) {
    const double before = overload(), less = share(leaving) - share(entering);
    load_N_[here] -= less, load_N_[there] += less;
    const double eased = (before - overload()) * overload_cost_;
    const uint64_t both = uint64_t{1} << here | uint64_t{1} << there;
    if (eased + cost_.propose(leaving, copies_.mask(leaving) ^ both, entering, copies_.mask(entering) ^ both) >=
        -allowed_loss) {
      cost_.accept();
      std::swap(held_N_[here][at], held_N_[there][other_at]);
      std::swap(copies_.at(leaving, here), copies_.at(leaving, there));
      std::swap(copies_.at(entering, here), copies_.at(entering, there));
      return;
    }
    cost_.reject();
    load_N_[here] += less, load_N_[there] -= less;
  }

  const Part& part_;
  const std::vector<double>& limit_N_;
  NodeCopies& copies_;
  Cost cost_;
  Random random_;
  std::vector<std::vector<int>> held_N_;  // experts with exactly one copy on the node: only these move
  std::vector<double> load_N_;
  double temperature_ = 0.0, overload_cost_ = 0.0;
};

}  // namespace

void anneal(const Part& part, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
            const std::vector<double>& limit_N, double work, uint64_t seed, NodeCopies& copies) {
  if (traffic == Traffic::kExpertMessages)
    Annealer<Messages>(part, tokens, incidence, limit_N, seed, copies).run(work);
  else if (copies.num_nodes <= NodeSets<1>::kMaxNodes)
    Annealer<Crossings<1>>(part, tokens, incidence, limit_N, seed, copies).run(work);
  else
    Annealer<Crossings<4>>(part, tokens, incidence, limit_N, seed, copies).run(work);
}

}  // namespace eprt::balancer
