#include "weights.h"

#include <algorithm>
#include <cmath>

namespace eprt::balancer {
namespace {

struct Vessel {  // a slot while its expert is poured
  int64_t slot;
  double level;  // time of its GPU without this expert
  double speed;
};

// Raises the lowest vessels to one common level until `load` is used up.
void pour(std::vector<Vessel>& vessels, double load, double* load_P) {
  std::sort(vessels.begin(), vessels.end(),
            [](const Vessel& a, const Vessel& b) { return a.level != b.level ? a.level < b.level : a.slot < b.slot; });
  double speed = 0.0, filled = 0.0, level = 0.0;  // filled: load that lifts the first vessels from 0 to their levels
  size_t used = 0;
  for (; used < vessels.size(); used++) {
    if (used > 0 && vessels[used].level >= level) break;
    speed += vessels[used].speed;
    filled += vessels[used].level * vessels[used].speed;
    level = (load + filled) / speed;
  }
  for (size_t i = 0; i < vessels.size(); i++)
    load_P[vessels[i].slot] = i < used ? std::max(0.0, (level - vessels[i].level) * vessels[i].speed) : 0.0;
}

double largest_time(const std::vector<double>& load_G, const double* speed_G) {
  double largest = 0.0;
  for (size_t gpu = 0; gpu < load_G.size(); gpu++)
    if (speed_G[gpu] > 0) largest = std::max(largest, load_G[gpu] / speed_G[gpu]);
  return largest;
}

}  // namespace

double fill_weights(const int64_t* slot_P, int64_t num_slots, int64_t num_experts, int64_t num_gpus,
                    const double* load_E, const double* speed_G, double target, bool keep_start, double* weight_P) {
  const int64_t per_gpu = num_slots / num_gpus;
  std::vector<std::vector<int64_t>> slots_E(num_experts);
  for (int64_t slot = 0; slot < num_slots; slot++)
    if (slot_P[slot] >= 0) slots_E[slot_P[slot]].push_back(slot);
  std::vector<double> load_P(num_slots, 0.0), load_G(num_gpus, 0.0);
  for (int64_t slot = 0; slot < num_slots; slot++) {
    if (!keep_start) weight_P[slot] = slot_P[slot] < 0 ? 0.0 : 1.0 / static_cast<double>(slots_E[slot_P[slot]].size());
    load_P[slot] = slot_P[slot] < 0 ? 0.0 : load_E[slot_P[slot]] * weight_P[slot];
    load_G[slot / per_gpu] += load_P[slot];
  }
  std::vector<int64_t> order;  // the largest first: they can move most
  for (int64_t expert = 0; expert < num_experts; expert++)
    if (slots_E[expert].size() > 1 && load_E[expert] > 0) order.push_back(expert);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return load_E[a] > load_E[b]; });
  double largest = largest_time(load_G, speed_G);
  if (largest <= target || order.empty()) return largest;
  constexpr int kMaxSweeps = 100;
  constexpr double kWorthwhile = 1e-5;  // of the largest time, per sweep
  std::vector<Vessel> vessels;
  for (int sweep = 0; sweep < kMaxSweeps; sweep++) {
    for (int64_t expert : order) {
      vessels.clear();
      for (int64_t slot : slots_E[expert]) {
        const int64_t gpu = slot / per_gpu;
        if (speed_G[gpu] > 0) vessels.push_back({slot, (load_G[gpu] - load_P[slot]) / speed_G[gpu], speed_G[gpu]});
        load_G[gpu] -= load_P[slot];
        load_P[slot] = 0.0;
      }
      pour(vessels, load_E[expert], load_P.data());
      for (int64_t slot : slots_E[expert]) load_G[slot / per_gpu] += load_P[slot];
    }
    const double before = largest;
    largest = largest_time(load_G, speed_G);
    if (largest <= target || (sweep > 3 && std::abs(before - largest) < kWorthwhile * before)) break;
  }
  for (int64_t expert : order) {
    double sum = 0.0;
    for (int64_t slot : slots_E[expert]) sum += load_P[slot];
    for (int64_t slot : slots_E[expert]) weight_P[slot] = load_P[slot] / sum;
  }
  return largest;
}

}  // namespace eprt::balancer
