// Local search on a packing: the busiest GPU gets rid of load, by the step that leaves the smallest larger time.

#include <algorithm>

#include "packing.h"

namespace eprt::balancer {
namespace {

struct Step {
  enum Kind { kNone, kExchange, kRecount } kind = kNone;
  double peak = 0.0;  // the largest time of all GPUs that the step touches
  int given = -1;     // exchange: leaves the busiest GPU. recount: gets a copy more, on `gpu`
  int taken = -1;     // exchange: comes from `gpu`. recount: loses its copy on `gpu`
  int gpu = -1;
};

// Copies `given` of the busiest GPU and `taken` of another change places.
Step best_exchange(const Packing& packing, int busiest, double target, Scope scope) {
  const int per_node = packing.part().gpus_per_node;
  Step best;
  best.peak = packing.time(busiest) * (1 - 1e-12);
  const double load = packing.load(busiest);
  for (int gpu = 0; gpu < packing.part().num_gpus(); gpu++) {
    if (packing.time(gpu) >= best.peak || packing.part().usable_G[gpu] == 0) continue;
    if (scope == Scope::kInsideNodes && gpu / per_node != busiest / per_node) continue;
    for (int given : packing.experts(busiest)) {
      if (packing.holds(gpu, given)) continue;
      for (int taken : packing.experts(gpu)) {
        const double less = packing.share(given) - packing.share(taken);
        if (less <= 0 || packing.holds(busiest, taken)) continue;
        const double peak =
            std::max(packing.time_with(busiest, load - less), packing.time_with(gpu, packing.load(gpu) + less));
        if (peak < best.peak) {
          best = {Step::kExchange, peak, given, taken, gpu};
          if (peak <= target) return best;
        }
      }
    }
  }
  return best;
}

// The largest time among the GPUs touched when `given` gets a copy on gpu, in the place of one of `taken`.
double recount_peak(const Packing& packing, int busiest, int given, int taken, int gpu) {
  const double share_given = packing.share_with(given, packing.count(given) + 1);
  const double rise = packing.share_with(taken, packing.count(taken) - 1) - packing.share(taken);
  const double fall = packing.share(given) - share_given;
  double peak = packing.time_with(gpu, packing.load(gpu) - packing.share(taken) + share_given);
  for (int holder : packing.gpus(taken)) {
    if (holder == gpu) continue;
    const double less = packing.holds(holder, given) ? fall : 0.0;
    peak = std::max(peak, packing.time_with(holder, packing.load(holder) + rise - less));
  }
  const double more = packing.holds(busiest, taken) ? rise : 0.0;
  return std::max(peak, packing.time_with(busiest, packing.load(busiest) + more - fall));
}

// One of the busiest GPU's experts gets a copy elsewhere, in the place of an expert that has copies to spare.
Step best_recount(const Packing& packing, int busiest, double target) {
  const Part& part = packing.part();
  Step best;
  best.peak = packing.time(busiest) * (1 - 1e-12);
  for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
    if (gpu == busiest || packing.time(gpu) >= best.peak) continue;
    for (int taken : packing.experts(gpu)) {
      if (packing.count(taken) <= part.min_copies) continue;
      for (int given : packing.experts(busiest)) {
        if (packing.holds(gpu, given)) continue;
        const double peak = recount_peak(packing, busiest, given, taken, gpu);
        if (peak < best.peak) {
          best = {Step::kRecount, peak, given, taken, gpu};
          if (peak <= target) return best;
        }
      }
    }
  }
  return best;
}

}  // namespace

void improve(Packing& packing, double target, Scope scope) {
  // Each step lowers the busiest GPU and lifts none above where that was, so this ends by itself; the limit only keeps
  // the time in bounds on inputs made of thousands of equal shares.
  const int limit = 8 * packing.part().num_usable();
  for (int i = 0; i < limit; i++) {
    const int busiest = packing.busiest();
    if (packing.time(busiest) <= target) return;
    Step step = best_exchange(packing, busiest, target, scope);
    if (scope == Scope::kAnywhere && (step.kind == Step::kNone || step.peak > target)) {
      const Step recount = best_recount(packing, busiest, target);
      if (recount.kind != Step::kNone && (step.kind == Step::kNone || recount.peak < step.peak)) step = recount;
    }
    if (step.kind == Step::kNone) return;
    if (step.kind == Step::kExchange) {
      packing.exchange(step.given, busiest, step.taken, step.gpu);
    } else {
      packing.remove(step.taken, step.gpu);
      packing.add(step.given, step.gpu);
    }
  }
}

}  // namespace eprt::balancer
