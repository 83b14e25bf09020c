#include "plan.h"

#include <algorithm>
#include <limits>
#include <list>
#include <utility>

#include "eplb_search.h"
#include "weights.h"

namespace eprt::balancer {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

template <typename Values>
bool all_equal(const Values& values) {
  return std::all_of(values.begin(), values.end(), [&](auto value) { return value == values[0]; });
}

// Equal loads carry no information: experts stay in order, as models place them by default.
bool pack_in_order(const Part& part, Packing& packing) {
  if (!all_equal(part.load_E) || !all_equal(part.speed_G) || !all_equal(part.usable_G) || part.min_copies > 1)
    return false;
  const int num_gpus = part.num_gpus(), num_experts = part.num_experts();
  int expert = 0;
  for (int gpu = 0; gpu < num_gpus; gpu++)
    for (int end = expert + num_experts / num_gpus + (gpu < num_experts % num_gpus); expert < end; expert++)
      packing.add_copy(expert, gpu);
  expert = 0;
  for (int gpu = 0; gpu < num_gpus; gpu++) {
    while (packing.room(gpu) > 0) {
      while (packing.holds(gpu, expert)) expert = (expert + 1) % num_experts;
      packing.add_copy(expert, gpu);
      expert = (expert + 1) % num_experts;
    }
  }
  return true;
}

// Our own plan of a layer, part by part. The division must outlive it.
class PartPlans {
 public:
  PartPlans(const Problem& problem, int64_t layer, const Division& division) : num_slots_(problem.num_slots()) {
    for (size_t i = 0; i < division.experts.size(); i++) {
      const std::vector<int>& experts = division.experts[i];
      if (experts.empty()) continue;
      const int first_gpu = static_cast<int>(i) * division.gpus_per_part;
      PartPlan& plan = plans_.emplace_back(
          experts, make_part(problem, layer, experts, first_gpu, division.gpus_per_part), first_gpu);
      plan.bound = division.experts.size() == 1 ? division.bound : std::max(division.bound, lower_bound(plan.part));
    }
  }

  // The search of each part stops close to its lower bound, but not above `most`.
  void improve_to(double most) {
    for (PartPlan& plan : plans_)
      if (!plan.in_order) improve(plan.packing, std::min(plan.bound * kCloseEnough, most));
  }

  void write(int64_t* slot_P) const {
    std::fill(slot_P, slot_P + num_slots_, kEmpty);
    for (const PartPlan& plan : plans_) write_slots(plan.packing, plan.experts, plan.first_gpu, slot_P, !plan.in_order);
  }

 private:
  struct PartPlan {
    PartPlan(const std::vector<int>& experts, Part of, int first_gpu)
        : experts(experts),
          part(std::move(of)),
          first_gpu(first_gpu),
          packing(part),
          in_order(pack_in_order(part, packing)) {
      if (!in_order) packing = pack(part);
    }
    const std::vector<int>& experts;
    Part part;
    int first_gpu;
    Packing packing;
    bool in_order;
    double bound = 0.0;
  };

  int64_t num_slots_;
  std::list<PartPlan> plans_;  // a packing points to its part
};

// Under even shares weights cannot level what slots leave uneven. So where EPLB's policy finds a better placement, or
// the bound is far, a second search starts from EPLB's placement; and where only second copies on one GPU make that
// placement better than both, it is used as it is.
void plan_even(const Problem& problem, int64_t layer, const Division& parts, int64_t* slot_P) {
  PartPlans plans(problem, layer, parts);
  plans.improve_to(kNoLimit);
  plans.write(slot_P);
  if (!eplb_can_plan(problem, layer)) return;
  double time = largest_even_time(problem, layer, slot_P);
  constexpr double kWorthwhile = 1.01;  // of the bound; nearer to it a second search costs more than it gains
  const bool is_near = time <= parts.bound * kWorthwhile;
  const std::vector<int64_t> eplb_P = EplbSearch(problem, layer, is_near ? time : kNoLimit).slots();
  if (eplb_P.empty()) return;
  const double eplb_time = largest_even_time(problem, layer, eplb_P.data());
  std::vector<int64_t> other_P(problem.num_slots());
  auto keep_better = [&] {
    const double other_time = largest_even_time(problem, layer, other_P.data());
    if (other_time < time) std::copy(other_P.begin(), other_P.end(), slot_P), time = other_time;
  };
  if (time > eplb_time) {
    plans.improve_to(eplb_time);
    plans.write(other_P.data());
    keep_better();
  }
  if (time > eplb_time || !is_near) {
    improve_eplb(problem, layer, eplb_P, std::min(parts.bound * kCloseEnough, eplb_time), other_P.data());
    keep_better();
  }
  if (time > eplb_time && problem.second_copies) std::copy(eplb_P.begin(), eplb_P.end(), slot_P);
}

}  // namespace

double plan_layer(const Problem& problem, int64_t layer, int64_t* slot_P, double* weight_P) {
  const Division parts = divide(problem, layer);
  if (problem.even_shares) {
    plan_even(problem, layer, parts, slot_P);
    fill_weights(problem, layer, slot_P, 0.0, false, weight_P);
    return parts.bound;
  }
  PartPlans plans(problem, layer, parts);
  plans.improve_to(kNoLimit);
  plans.write(slot_P);
  double target = parts.bound * kCloseEnough;
  auto fill = [&](bool keep_start) { return fill_weights(problem, layer, slot_P, target, keep_start, weight_P); };
  const double time = largest_even_time(problem, layer, slot_P);
  std::vector<int64_t> eplb_P;
  if (eplb_can_plan(problem, layer)) eplb_P = EplbSearch(problem, layer, time).slots();
  if (eplb_P.empty()) {
    fill(false);
    return parts.bound;
  }
  const double eplb_time = largest_even_time(problem, layer, eplb_P.data());
  target = std::min(target, eplb_time);
  plan_from_eplb(problem, layer, eplb_P, parts.bound, slot_P, weight_P);
  // If only uneven shares match EPLB's time (such as two of three copies on one GPU), its split is the start.
  fill(largest_even_time(problem, layer, slot_P) > eplb_time);
  return parts.bound;
}

}  // namespace eprt::balancer
