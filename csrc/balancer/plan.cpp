#include "plan.h"

#include <algorithm>

#include "weights.h"

namespace eprt::balancer {
namespace {

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
  double target = parts.bound * kCloseEnough;
  auto fill = [&](bool keep_start) { return fill_weights(problem, layer, slot_P, target, keep_start, weight_P); };
  if (!eplb_can_plan(problem, layer)) {
    fill(false);
    return parts.bound;
  }
  const std::vector<int64_t> eplb_P = eplb_slots(problem, layer);
  const double eplb_time = largest_even_time(problem, layer, eplb_P.data());
  target = std::min(target, eplb_time);
  if (largest_even_time(problem, layer, slot_P) > eplb_time || fill(false) > eplb_time) {
    plan_from_eplb(problem, layer, eplb_P, parts.bound, slot_P, weight_P);
    // If only uneven shares match EPLB's time (such as two of three copies on one GPU), its split is the start.
    fill(largest_even_time(problem, layer, slot_P) > eplb_time);
  }
  return parts.bound;
}

}  // namespace eprt::balancer
