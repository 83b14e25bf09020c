#include "compound_move.h"

#include <algorithm>

namespace eprt::balancer {
namespace {

// The peak of replacing taken by given on all GPUs but raised, the only GPU that would exceed `limit`. Returns false if
// several would, or none: then a single move suffices.
bool lifts_one(const Packing& packing, CompoundMove& move, int busiest, double limit) {
  const double share_given = packing.share_with(move.given, packing.count(move.given) + 1);
  const double fall = packing.share(move.given) - share_given;
  const double rise = packing.share_with(move.taken, packing.count(move.taken) - 1) - packing.share(move.taken);
  auto time = [&](int gpu, double more) {
    return packing.time_with(gpu, packing.load(gpu) + more - (packing.holds(gpu, move.given) ? fall : 0.0));
  };
  if (packing.holds(busiest, move.taken)) return false;
  move.peak = std::max(time(busiest, 0.0),
                       packing.time_with(move.gpu, packing.load(move.gpu) + share_given - packing.share(move.taken)));
  move.raised = -1;
  for (int holder : packing.gpus(move.taken)) {
    if (holder == move.gpu) continue;
    const double after = time(holder, rise);
    if (after < limit) {
      move.peak = std::max(move.peak, after);
    } else {
      if (move.raised >= 0) return false;
      move.raised = holder;
    }
  }
  return move.raised >= 0 && move.peak < limit;
}

// Completes the move by the best exchange of the raised GPU; stores it in best if its peak is smaller.
void pass_on(const PlacedLayer& placed, CompoundMove move, int busiest, CompoundMove& best) {
  const Packing& packing = placed.packing;
  const int raised = move.raised;
  const double rise = packing.share_with(move.taken, packing.count(move.taken) - 1) - packing.share(move.taken);
  const double load = packing.load(raised) + rise;
  for (int helper = 0; helper < packing.part().num_gpus(); helper++) {
    if (helper == raised || helper == move.gpu || helper == busiest || packing.time(helper) >= best.peak) continue;
    for (int passed : packing.experts(raised)) {
      if (passed == move.taken || passed == move.given || packing.holds(helper, passed)) continue;
      if (!placed.may_move_to(helper, passed)) continue;
      for (int lighter : packing.experts(helper)) {
        const double less = packing.share(passed) - packing.share(lighter);
        if (less <= 0 || lighter == move.given || packing.holds(raised, lighter)) continue;
        const double peak = std::max({move.peak, packing.time_with(raised, load - less),
                                      packing.time_with(helper, packing.load(helper) + less)});
        if (peak >= best.peak || !placed.may_move_to(raised, lighter)) continue;
        best = move;
        best.peak = peak, best.passed = passed, best.lighter = lighter, best.helper = helper;
      }
    }
  }
}

}  // namespace

CompoundMove best_compound_move(const PlacedLayer& placed, int busiest) {
  const Packing& packing = placed.packing;
  const Part& part = packing.part();
  CompoundMove best;
  best.peak = packing.time(busiest) * (1 - 1e-12);
  for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
    if (gpu == busiest || part.usable_G[gpu] == 0) continue;
    for (int taken : packing.experts(gpu)) {
      if (!placed.can_spare(taken, gpu)) continue;
      for (int given : packing.experts(busiest)) {
        CompoundMove move;
        move.given = given, move.taken = taken, move.gpu = gpu;
        if (given == taken || packing.holds(gpu, given) || !lifts_one(packing, move, busiest, best.peak)) continue;
        pass_on(placed, move, busiest, best);
      }
    }
  }
  return best;
}

void apply(PlacedLayer& placed, const CompoundMove& move) {
  placed.replace_copy(move.taken, move.given, move.gpu);
  placed.exchange_copies(move.passed, move.raised, move.lighter, move.helper);
}

}  // namespace eprt::balancer
