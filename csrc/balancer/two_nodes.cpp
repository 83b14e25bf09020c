#include "two_nodes.h"

#include <algorithm>
#include <cmath>

namespace eprt::balancer {
namespace {

// Tokens looked at, which bounds the time: so many for each token and expert, within limits.
constexpr double kWork = 8.0, kLeastWork = 5e5, kMostWork = 6e6;
constexpr double kTemperature = 4e-4;  // crossings per token that a move may cost, about, at the beginning
constexpr double kOverload = 6.0;      // crossings per token that a node costs which is above its limit by its own load

class Random {  // splitmix64
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  size_t below(size_t limit) { return (next() >> 32) * limit >> 32; }
  double unit() { return (static_cast<double>(next() >> 11) + 1) * 0x1p-53; }  // above 0

 private:
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  uint64_t state_;
};

class Annealer {
 public:
  Annealer(const Part& part, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
           const std::vector<double>& limit_N, uint64_t seed, NodeCopies& copies)
      : part_(part),
        incidence_(incidence),
        messages_(traffic == Traffic::kExpertMessages),
        limit_N_(limit_N),
        copies_(copies),
        random_(seed) {
    double all_tokens = 0.0, load = 0.0;
    for (int64_t token = 0; token < tokens.num_tokens; token++) all_tokens += tokens.weight(token);
    for (int node = 0; node < 2; node++) {
      missing_NT_[node].assign(tokens.num_tokens, 0);
      for (int64_t token = 0; token < tokens.num_tokens; token++)
        worth_NT_[node].push_back(tokens.weight(token) * (tokens.node_T ? tokens.node_T[token] == node : 0.5));
    }
    for (int expert = 0; expert < part.num_experts(); expert++) {
      load += part.load_E[expert];
      for (int node = 0; node < 2; node++) {
        load_N_[node] += copies.at(expert, node) * share(expert);
        if (copies.at(expert, node) == 1) held_N_[node].push_back(expert);
        if (copies.at(expert, node) > 0) continue;
        for (int token : incidence.tokens_E[expert]) missing_NT_[node][token]++;
      }
    }
    limit_ = std::clamp(kWork * static_cast<double>(tokens.num_tokens) * part.num_experts(), kLeastWork, kMostWork);
    temperature_ = kTemperature * all_tokens;
    overload_cost_ = load > 0 ? kOverload * all_tokens * 2 / load : 0.0;
  }

  void run() {
    while (work_ < limit_) {
      // So much may be lost this time: less and less.
      const double most = -temperature_ * (1 - work_ / limit_) * std::log(random_.unit());
      work_ += 16;  // a move that cannot be made takes time too
      const int node = static_cast<int>(random_.below(2));
      if (held_N_[node].empty()) continue;
      const size_t at = random_.below(held_N_[node].size());
      const int leaves = held_N_[node][at];
      if (copies_.at(leaves, 1 - node) > 0)
        try_replace(node, at, leaves, most);
      else
        try_exchange(node, at, leaves, most);
    }
  }

 private:
  double share(int expert) const { return part_.load_E[expert] / copies_.count_E[expert]; }
  double overload() const { return std::max(0.0, load_N_[0] - limit_N_[0]) + std::max(0.0, load_N_[1] - limit_N_[1]); }

  // A copy comes to a node that has none, or the only one leaves; returns the crossings saved.
  double toggle(int expert, int node, bool comes) {
    double saved = 0.0;
    uint16_t* missing_T = missing_NT_[node].data();
    const float* worth_T = worth_NT_[node].data();
    for (int token : incidence_.tokens_E[expert]) {
      if (comes)
        saved += (--missing_T[token] == 0 || messages_) ? worth_T[token] : 0.0F;
      else
        saved -= (missing_T[token]++ == 0 || messages_) ? worth_T[token] : 0.0F;
    }
    work_ += static_cast<double>(incidence_.tokens_E[expert].size());
    return saved;
  }

  void count(int expert, int node, int more) {
    for (int other = 0; other < 2; other++) load_N_[other] -= copies_.at(expert, other) * share(expert);
    copies_.at(expert, node) += more;
    copies_.count_E[expert] += more;
    for (int other = 0; other < 2; other++) load_N_[other] += copies_.at(expert, other) * share(expert);
  }

  // An expert that both nodes have leaves one; one that only the other has comes as well.
  void try_replace(int node, size_t at, int leaves, double most) {
    if (copies_.count_E[leaves] <= copies_.min_E[leaves]) return;
    const auto& others = held_N_[1 - node];
    const int comes = others.empty() ? leaves : others[random_.below(others.size())];
    if (copies_.at(comes, node) > 0 || copies_.count_E[comes] >= part_.num_live()) return;
    const double before = overload();
    count(leaves, node, -1);
    count(comes, node, 1);
    const double eased = (before - overload()) * overload_cost_;
    if (eased + toggle(comes, node, true) + toggle(leaves, node, false) >= -most) {
      held_N_[node][at] = comes;
      return;
    }
    toggle(comes, node, false);
    toggle(leaves, node, true);
    count(comes, node, -1);
    count(leaves, node, 1);
  }

  // Two experts that one node each has change places.
  void try_exchange(int node, size_t at, int leaves, double most) {
    const int other = 1 - node;
    if (held_N_[other].empty()) return;
    const size_t other_at = random_.below(held_N_[other].size());
    const int comes = held_N_[other][other_at];
    if (copies_.at(comes, node) > 0) return;
    const double before = overload(), less = share(leaves) - share(comes);
    load_N_[node] -= less, load_N_[other] += less;
    const double eased = (before - overload()) * overload_cost_;
    if (eased + toggle(comes, node, true) + toggle(leaves, node, false) + toggle(leaves, other, true) +
            toggle(comes, other, false) >=
        -most) {
      std::swap(held_N_[node][at], held_N_[other][other_at]);
      std::swap(copies_.at(leaves, node), copies_.at(leaves, other));
      std::swap(copies_.at(comes, node), copies_.at(comes, other));
      return;
    }
    toggle(comes, node, false);
    toggle(leaves, node, true);
    toggle(leaves, other, false);
    toggle(comes, other, true);
    load_N_[node] += less, load_N_[other] -= less;
  }

  const Part& part_;
  const Incidence& incidence_;
  bool messages_;
  const std::vector<double>& limit_N_;
  NodeCopies& copies_;
  Random random_;
  std::vector<uint16_t> missing_NT_[2];  // the token's experts that the node has no copy of
  std::vector<float> worth_NT_[2];       // crossings saved when the node has all
  std::vector<int> held_N_[2];           // experts with one copy on the node; several there stay together
  double load_N_[2] = {0.0, 0.0};
  double temperature_ = 0.0, overload_cost_ = 0.0, work_ = 0.0, limit_ = 0.0;
};

}  // namespace

void anneal_two_nodes(const Part& part, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
                      const std::vector<double>& limit_N, uint64_t seed, NodeCopies& copies) {
  Annealer(part, tokens, incidence, traffic, limit_N, seed, copies).run();
}

}  // namespace eprt::balancer
