// EplbSearch: the best of all placements of a layer that planners by EPLB's policy may make.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "eplb.h"
#include "problem.h"

namespace eprt::balancer {

// The policy leaves two things open: the precision of sums, and the order of groups with equal load, because nobody's
// sort is stable. So this plans in both precisions, and tries every order of groups whose loads are equal up to
// rounding. The order of the experts within a node then matters only where the last copies could go to any of several
// experts with the same load per copy: every choice among them is tried, too.
class EplbSearch {
 public:
  // below: finds only placements whose largest GPU time is less.
  EplbSearch(const Problem& problem, int64_t layer, double below);
  // Of the best placement; empty if there is none.
  std::vector<int64_t> slots() const;

 private:
  using Groups = std::vector<int>;  // of one node, by their number in order_, ascending

  struct NodePlan {
    double peak;                  // the largest load of a GPU; at least limit_ if no plan was made
    std::vector<int64_t> slot_P;  // the expert of each slot of the node
  };

  // Puts the other groups onto nodes in every way that the policy allows. peak: the largest load of a full node's GPU.
  void place_groups(size_t num_placed, double peak);
  double peak_of(const Groups& groups);
  NodePlan plan_node(const Groups& groups);
  // These keep what lowers the peak. experts: of the node, in the order in which ties go to the earlier one.
  template <typename Number>
  void try_other_last_copies(const std::vector<int>& experts, const std::vector<Number>& load_E, EplbCopies copies,
                             NodePlan& best);
  template <typename Number>
  void try_copies(const std::vector<int>& experts, const std::vector<Number>& load_E, const EplbCopies& copies,
                  EplbPacks& packs, NodePlan& best);

  bool same_load(float a, float b) const;
  bool same_experts(int group, int other) const;
  float load_of(int number) const { return load_of_group_[order_[number]]; }
  int first_expert(int number) const { return order_[number] * group_size_; }

  const double* load_E_;
  std::vector<float> load32_E_;
  EplbShape shape_;
  int group_size_, groups_per_node_, gpus_per_node_, slots_per_node_;
  std::vector<float> load_of_group_;
  std::vector<int> order_;       // the groups, the heaviest first
  double limit_;                 // the largest load of a GPU in the best placement so far
  std::vector<Groups> nodes_;    // what has been placed so far
  std::vector<float> load_N_;    // of each node
  std::vector<uint8_t> placed_;  // by a group's number in order_
  std::vector<Groups> best_;
  std::map<Groups, NodePlan> plans_;
  std::set<std::vector<Groups>> seen_;
  int plans_left_, steps_left_;
};

}  // namespace eprt::balancer
