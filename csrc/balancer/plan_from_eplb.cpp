// Plans that start from EPLB's placement, for layers where it happens to be better than our own plan.

#include <algorithm>
#include <set>

#include "plan.h"

namespace eprt::balancer {
namespace {

// Fills the slots of dropped second copies with the experts whose shares stay smallest.
void fill_anew(Packing& packing) {
  const Part& part = packing.part();
  for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
    while (packing.room(gpu) > 0) {
      int best = -1;
      double best_share = 0.0;
      for (int expert = 0; expert < part.num_experts(); expert++) {
        const double share = packing.share_with(expert, packing.count(expert) + 1);
        if (!packing.holds(gpu, expert) && (best < 0 || share < best_share)) best = expert, best_share = share;
      }
      if (best < 0) break;
      packing.add_copy(best, gpu);
    }
  }
}

}  // namespace

bool eplb_can_plan(const Problem& problem, int64_t layer) {
  const int32_t* usable_G = problem.usable_LG + layer * problem.num_gpus;
  for (int64_t gpu = 0; gpu < problem.num_gpus; gpu++)
    if (usable_G[gpu] != problem.slots_per_gpu || problem.speed_G[gpu] != problem.speed_G[0]) return false;
  return problem.min_copies == 1 && (!problem.hierarchical || problem.num_groups % problem.num_nodes == 0);
}

void improve_eplb(const Problem& problem, int64_t layer, const std::vector<int64_t>& eplb_P, double target,
                  int64_t* slot_P) {
  const int64_t num_slots = problem.num_slots(), per_gpu = problem.slots_per_gpu;
  std::fill(slot_P, slot_P + num_slots, kEmpty);
  const int num_parts = problem.hierarchical ? static_cast<int>(problem.num_nodes) : 1;
  const int gpus_per_part = static_cast<int>(problem.num_gpus) / num_parts;
  for (int i = 0; i < num_parts; i++) {
    const auto first = eplb_P.begin() + i * gpus_per_part * per_gpu;
    const std::set<int> distinct(first, first + gpus_per_part * per_gpu);
    const std::vector<int> experts(distinct.begin(), distinct.end());
    const Part part = make_part(problem, layer, experts, i * gpus_per_part, gpus_per_part);
    Packing packing(part);
    for (int gpu = 0; gpu < gpus_per_part; gpu++)
      for (int64_t slot = 0; slot < per_gpu; slot++) {
        const auto expert = std::lower_bound(experts.begin(), experts.end(), first[gpu * per_gpu + slot]);
        const int local = static_cast<int>(expert - experts.begin());
        if (!packing.holds(gpu, local)) packing.add_copy(local, gpu);
      }
    fill_anew(packing);
    improve(packing, target);
    write_slots(packing, experts, i * gpus_per_part, slot_P);
  }
}

void plan_from_eplb(const Problem& problem, int64_t layer, const std::vector<int64_t>& eplb_P, double bound,
                    int64_t* slot_P, double* weight_P) {
  const int64_t num_slots = problem.num_slots(), per_gpu = problem.slots_per_gpu;
  const int num_parts = problem.hierarchical ? static_cast<int>(problem.num_nodes) : 1;
  const double* load_E = problem.load_E(layer);
  const double eplb_time = largest_even_time(problem, layer, eplb_P.data());
  improve_eplb(problem, layer, eplb_P, bound * kCloseEnough, slot_P);
  if (largest_even_time(problem, layer, slot_P) <= eplb_time) return;
  // Only uneven shares match EPLB's time (such as two of an expert's three copies on one GPU). Use EPLB's placement
  // itself: copies of an expert on one GPU become one slot with their joint weight, the freed slots get no weight.
  std::vector<int> count_E(problem.num_experts, 0);
  for (int64_t expert : eplb_P) count_E[expert]++;
  std::fill(slot_P, slot_P + num_slots, kEmpty);
  std::fill(weight_P, weight_P + num_slots, 0.0);
  for (int64_t slot = 0; slot < num_slots; slot++) {
    int64_t* gpu_slots = slot_P + slot / per_gpu * per_gpu;
    int64_t* place = std::find(gpu_slots, gpu_slots + per_gpu, eplb_P[slot]);
    if (place == gpu_slots + per_gpu) place = std::find(gpu_slots, gpu_slots + per_gpu, kEmpty);
    *place = eplb_P[slot];
    weight_P[place - slot_P] += 1.0 / count_E[eplb_P[slot]];
  }
  for (int64_t slot = 0; slot < num_slots; slot++) {
    if (slot_P[slot] != kEmpty) continue;
    const int64_t* gpu_slots = slot_P + slot / per_gpu * per_gpu;
    const int64_t part = slot / (num_slots / num_parts);
    int64_t best = kEmpty;  // the part's expert with the largest share that the GPU does not hold
    for (int64_t other = part * (num_slots / num_parts); other < (part + 1) * (num_slots / num_parts); other++) {
      const int64_t expert = eplb_P[other];
      if (std::find(gpu_slots, gpu_slots + per_gpu, expert) != gpu_slots + per_gpu) continue;
      if (best == kEmpty || load_E[expert] / count_E[expert] > load_E[best] / count_E[best]) best = expert;
    }
    if (best != kEmpty) slot_P[slot] = best, count_E[best]++;
  }
}

}  // namespace eprt::balancer
