#include "plan.h"

#include <algorithm>

#include "weights.h"

namespace eprt::balancer {
namespace {

template <typename Values>
bool all_equal(const Values& values) {
  return std::all_of(values.begin(), values.end(), [&](auto value) { return value == values[0]; });
}

// Without a difference in load nothing is known: experts in order, so that such a layer stays where models put it.
bool pack_in_order(const Part& part, Packing& packing) {
  if (!all_equal(part.load_E) || !all_equal(part.speed_G) || !all_equal(part.usable_G) || part.min_copies > 1)
    return false;
  const int num_gpus = part.num_gpus(), num_experts = part.num_experts();
  int expert = 0;
  for (int gpu = 0; gpu < num_gpus; gpu++)
    for (int end = expert + num_experts / num_gpus + (gpu < num_experts % num_gpus); expert < end; expert++)
      packing.add(expert, gpu);
  expert = 0;
  for (int gpu = 0; gpu < num_gpus; gpu++) {
    while (packing.room(gpu) > 0) {
      while (packing.holds(gpu, expert)) expert = (expert + 1) % num_experts;
      packing.add(expert, gpu);
      expert = (expert + 1) % num_experts;
    }
  }
  return true;
}

void plan_part(const Part& part, const std::vector<int>& experts, int first_gpu, double bound, int64_t* slot_P) {
  Packing packing(part);
  const bool in_order = pack_in_order(part, packing);
  if (!in_order) {
    packing = pack(part);
    improve(packing, std::max(bound, lower_bound(part)) * kCloseEnough);
  }
  write_slots(packing, experts, first_gpu, slot_P, !in_order);
}

}  // namespace

double plan_layer(const Problem& problem, int64_t layer, int64_t* slot_P, double* weight_P) {
  const Division parts = divide(problem, layer);
  std::fill(slot_P, slot_P + problem.num_slots(), kEmpty);
  for (size_t i = 0; i < parts.experts.size(); i++) {
    const int first_gpu = static_cast<int>(i) * parts.gpus_per_part;
    const Part part = make_part(problem, layer, parts.experts[i], first_gpu, parts.gpus_per_part);
    if (part.num_experts() > 0) plan_part(part, parts.experts[i], first_gpu, parts.bound, slot_P);
  }
  bool keep_start = false;
  const double even = largest_even_time(problem, layer, slot_P);
  if (even > parts.bound * kCloseEnough && eplb_can_plan(problem, layer)) {
    std::vector<int64_t> other_P(problem.num_slots());
    std::vector<double> other_weight_P(problem.num_slots());
    const double eplb = plan_from_eplb(problem, layer, parts.bound, other_P.data(), other_weight_P.data());
    if (eplb < even) {
      const double other_even = largest_even_time(problem, layer, other_P.data());
      keep_start = other_even > eplb;  // only uneven shares match it, such as two of three copies on one GPU
      std::copy(other_P.begin(), other_P.end(), slot_P);
      std::copy(other_weight_P.begin(), other_weight_P.end(), weight_P);
    }
  }
  fill_weights(slot_P, problem.num_slots(), problem.num_experts, problem.num_gpus,
               problem.load_LE + layer * problem.num_experts, problem.speed_G, parts.bound * kCloseEnough, keep_start,
               weight_P);
  return parts.bound;
}

}  // namespace eprt::balancer
