// Local search on a packing: lowers the busiest GPU by the move with the smallest resulting peak.

#include <algorithm>

#include "packing.h"

namespace eprt::balancer {
namespace {

struct LocalMove {
  enum Kind { kNone, kExchange, kReassign } kind = kNone;
  double peak = 0.0;  // largest time among the affected GPUs, afterwards
  int given = -1;     // kExchange: leaves the busiest GPU. kReassign: gets one more copy, on `gpu`
  int taken = -1;     // kExchange: comes from `gpu`. kReassign: loses its copy on `gpu`
  int gpu = -1;
};

// Exchanges a copy of the busiest GPU with a copy of another GPU.
LocalMove best_exchange(const Packing& packing, int busiest, double target, Scope scope) {
  const int per_node = packing.part().gpus_per_node;
  LocalMove best;
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
          best = {LocalMove::kExchange, peak, given, taken, gpu};
          if (peak <= target) return best;
        }
      }
    }
  }
  return best;
}

// The largest time among the affected GPUs after `given` replaces `taken` on gpu.
double reassigned_peak(const Packing& packing, int busiest, int given, int taken, int gpu) {
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

// Gives one of the busiest GPU's experts one more copy elsewhere, replacing an expert that has copies to spare.
LocalMove best_reassignment(const Packing& packing, int busiest, double target) {
  const Part& part = packing.part();
  LocalMove best;
  best.peak = packing.time(busiest) * (1 - 1e-12);
  for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
    if (gpu == busiest || packing.time(gpu) >= best.peak) continue;
    for (int taken : packing.experts(gpu)) {
      if (packing.count(taken) <= part.min_copies) continue;
      for (int given : packing.experts(busiest)) {
        if (packing.holds(gpu, given)) continue;
        const double peak = reassigned_peak(packing, busiest, given, taken, gpu);
        if (peak < best.peak) {
          best = {LocalMove::kReassign, peak, given, taken, gpu};
          if (peak <= target) return best;
        }
      }
    }
  }
  return best;
}

}  // namespace

void improve(Packing& packing, double target, Scope scope) {
  // Each move lowers the busiest GPU and raises none to its former time, so the loop terminates. The limit only bounds
  // the time on inputs with thousands of equal shares.
  const int limit = 8 * packing.part().num_usable();
  for (int i = 0; i < limit; i++) {
    const int busiest = packing.busiest();
    if (packing.time(busiest) <= target) return;
    LocalMove move = best_exchange(packing, busiest, target, scope);
    if (scope == Scope::kAnywhere && (move.kind == LocalMove::kNone || move.peak > target)) {
      const LocalMove reassignment = best_reassignment(packing, busiest, target);
      if (reassignment.kind != LocalMove::kNone && (move.kind == LocalMove::kNone || reassignment.peak < move.peak))
        move = reassignment;
    }
    if (move.kind == LocalMove::kNone) return;
    if (move.kind == LocalMove::kExchange) {
      packing.exchange_copies(move.given, busiest, move.taken, move.gpu);
    } else {
      packing.remove_copy(move.taken, move.gpu);
      packing.add_copy(move.given, move.gpu);
    }
  }
}

}  // namespace eprt::balancer
