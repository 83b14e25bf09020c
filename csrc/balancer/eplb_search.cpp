#include "eplb_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace eprt::balancer {
namespace {

// Where very many groups or experts are equal, these end the search; eight equal groups on any nodes stay within.
constexpr int kMaxPlans = 1000, kMaxSteps = 10000;

EplbShape shape_of(const Problem& problem) {
  const bool whole_groups = problem.num_groups % problem.num_nodes == 0;
  return {problem.num_experts, problem.num_slots(), whole_groups ? problem.num_groups : 1,
          whole_groups ? problem.num_nodes : 1, problem.num_gpus};
}

}  // namespace

EplbSearch::EplbSearch(const Problem& problem, int64_t layer, double below)
    : load_E_(problem.load_E(layer)),
      load32_E_(load_E_, load_E_ + problem.num_experts),
      shape_(shape_of(problem)),
      group_size_(static_cast<int>(shape_.num_experts / shape_.num_groups)),
      groups_per_node_(static_cast<int>(shape_.num_groups / shape_.num_nodes)),
      gpus_per_node_(static_cast<int>(shape_.num_gpus / shape_.num_nodes)),
      slots_per_node_(static_cast<int>(shape_.num_slots / shape_.num_nodes)),
      load_of_group_(eplb_group_loads(shape_, load32_E_.data())),
      order_(shape_.num_groups),
      limit_(below * problem.speed_G[0]),
      nodes_(shape_.num_nodes),
      load_N_(shape_.num_nodes, 0.0F),
      placed_(shape_.num_groups, 0),
      plans_left_(kMaxPlans + 2 * static_cast<int>(shape_.num_nodes)),
      steps_left_(kMaxSteps + static_cast<int>(shape_.num_groups)) {
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return load_of_group_[a] > load_of_group_[b]; });
  place_groups(0, 0.0);
}

std::vector<int64_t> EplbSearch::slots() const {
  std::vector<int64_t> slot_P;
  for (const Groups& groups : best_) {
    const std::vector<int64_t>& of_node = plans_.at(groups).slot_P;
    slot_P.insert(slot_P.end(), of_node.begin(), of_node.end());
  }
  return slot_P;
}

bool EplbSearch::same_load(float a, float b) const {
  const float rounding = static_cast<float>(shape_.num_experts) * 0x1p-24F;  // of a sum of loads in any order
  return a == b || std::abs(a - b) <= rounding * std::max(a, b);
}

bool EplbSearch::same_experts(int number, int other) const {
  const double* first = load_E_ + first_expert(number);
  return std::equal(first, first + group_size_, load_E_ + first_expert(other));
}

void EplbSearch::place_groups(size_t num_placed, double peak) {
  if (peak >= limit_ || steps_left_-- <= 0) return;
  if (num_placed == order_.size()) {
    limit_ = peak, best_ = nodes_;
    return;
  }
  // With one node, or one group per node, all orders are the same but for the nodes' names.
  const bool in_any_order = shape_.num_nodes > 1 && groups_per_node_ > 1;
  auto is_open = [&](size_t node) { return static_cast<int>(nodes_[node].size()) < groups_per_node_; };
  std::vector<int> groups, nodes;  // of which each may be next
  for (int number = 0; number < static_cast<int>(order_.size()); number++) {
    if (placed_[number]) continue;
    if (!groups.empty() && !(in_any_order && same_load(load_of(number), load_of(groups[0])))) break;
    if (std::none_of(groups.begin(), groups.end(), [&](int other) { return same_experts(number, other); }))
      groups.push_back(number);
  }
  float lightest = std::numeric_limits<float>::infinity();
  for (size_t node = 0; node < nodes_.size(); node++)
    if (is_open(node)) lightest = std::min(lightest, load_N_[node]);
  bool has_empty = false;  // empty nodes are the same
  for (size_t node = 0; node < nodes_.size(); node++) {
    if (!is_open(node) || !same_load(load_N_[node], lightest) || (nodes_[node].empty() && has_empty)) continue;
    has_empty |= nodes_[node].empty();
    if (nodes.empty() || in_any_order) nodes.push_back(static_cast<int>(node));
  }
  if (groups.size() * nodes.size() > 1) {
    std::vector<Groups> state = nodes_;
    std::sort(state.begin(), state.end());
    if (!seen_.insert(std::move(state)).second) return;
  }
  for (int group : groups) {
    for (int node : nodes) {
      const Groups before = nodes_[node];
      const float load_before = load_N_[node];
      nodes_[node].insert(std::upper_bound(nodes_[node].begin(), nodes_[node].end(), group), group);
      load_N_[node] += load_of(group), placed_[group] = 1;
      place_groups(num_placed + 1, is_open(node) ? peak : std::max(peak, peak_of(nodes_[node])));
      nodes_[node] = before, load_N_[node] = load_before, placed_[group] = 0;
    }
  }
}

double EplbSearch::peak_of(const Groups& groups) {
  const auto known = plans_.find(groups);
  return (known != plans_.end() ? known : plans_.emplace(groups, plan_node(groups)).first)->second.peak;
}

EplbSearch::NodePlan EplbSearch::plan_node(const Groups& groups) {
  std::vector<int> experts;
  bool in_any_order = false;
  for (size_t i = 0; i < groups.size(); i++) {
    in_any_order |= i > 0 && same_load(load_of(groups[i - 1]), load_of(groups[i]));
    for (int expert = first_expert(groups[i]), end = expert + group_size_; expert < end; expert++)
      experts.push_back(expert);
  }
  double mean = 0.0;
  for (int expert : experts) mean += load_E_[expert] / gpus_per_node_;
  NodePlan best{std::numeric_limits<double>::infinity(), {}};
  if (mean >= limit_) return best;
  std::vector<float> load32_E;
  for (int expert : experts) load32_E.push_back(load32_E_[expert]);
  const std::vector<double> load64_E(load32_E.begin(), load32_E.end());
  EplbPacks packs;
  EplbCopies copies = eplb_copies(load32_E, slots_per_node_);
  try_copies(experts, load32_E, copies, packs, best);
  if (in_any_order) try_other_last_copies(experts, load32_E, copies, best);
  if (in_any_order || !eplb_copies_hold(load64_E, copies)) {
    copies = eplb_copies(load64_E, slots_per_node_);
    packs.order.clear();
  }
  try_copies(experts, load64_E, copies, packs, best);
  if (in_any_order) try_other_last_copies(experts, load64_E, copies, best);
  return best;
}

template <typename Number>
void EplbSearch::try_other_last_copies(const std::vector<int>& experts, const std::vector<Number>& load_E,
                                       EplbCopies copies, NodePlan& best) {
  auto share = [&](int expert, int count) { return load_E[expert] / static_cast<Number>(count); };
  auto share_before = [&](size_t slot) { return share(copies.expert_P[slot], copies.replica_P[slot]); };
  const size_t num_slots = copies.expert_P.size();
  if (num_slots == experts.size()) return;
  const Number last = share_before(num_slots - 1);
  size_t first_slot = num_slots;  // of those that could have gone to other experts
  while (first_slot > experts.size() && share_before(first_slot - 1) == last)
    copies.count_E[copies.expert_P[--first_slot]]--;
  std::map<Number, std::vector<int>> equal;  // the experts that are next, by load: those of the same load are alike
  for (int expert = 0; expert < static_cast<int>(experts.size()); expert++)
    if (share(expert, copies.count_E[expert]) == last) equal[load_E[expert]].push_back(expert);
  auto give = [&](auto& self, auto next, size_t slot) -> void {
    if (plans_left_ <= 0) return;
    if (slot == num_slots) {
      EplbPacks packs;
      return try_copies(experts, load_E, copies, packs, best);
    }
    if (next == equal.end()) return;
    const std::vector<int>& alike = next->second;
    ++next;
    size_t given = 0;
    for (; given < alike.size() && slot + given < num_slots; given++) {
      self(self, next, slot + given);
      copies.expert_P[slot + given] = alike[given], copies.count_E[alike[given]]++;
    }
    self(self, next, slot + given);
    while (given > 0) copies.count_E[alike[--given]]--;
  };
  if (equal.size() > 1) give(give, equal.begin(), first_slot);
}

template <typename Number>
void EplbSearch::try_copies(const std::vector<int>& experts, const std::vector<Number>& load_E,
                            const EplbCopies& copies, EplbPacks& packs, NodePlan& best) {
  if (plans_left_-- <= 0) return;
  eplb_pack_copies(load_E, copies, gpus_per_node_, packs);
  std::vector<double> load_G(gpus_per_node_, 0.0);
  for (int slot = 0; slot < slots_per_node_; slot++) {
    const int expert = copies.expert_P[slot];
    load_G[packs.pack_N[slot]] += load_E_[experts[expert]] / copies.count_E[expert];
  }
  const double peak = *std::max_element(load_G.begin(), load_G.end());
  if (peak >= best.peak) return;
  best.peak = peak;
  best.slot_P.resize(slots_per_node_);
  for (int slot = 0; slot < slots_per_node_; slot++)
    best.slot_P[packs.pack_N[slot] * (slots_per_node_ / gpus_per_node_) + packs.rank_N[slot]] =
        experts[copies.expert_P[slot]];
}

}  // namespace eprt::balancer
