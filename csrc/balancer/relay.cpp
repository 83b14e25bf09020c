#include "relay.h"

#include <algorithm>

namespace eprt::balancer {
namespace {

// What happens to GPUs other than `raised` when given's copy takes the place of taken's; sets raised to the one GPU
// that would exceed `limit`. False when more than one would, or none: then it is a single move's business.
bool lifts_one(const Packing& packing, Relay& relay, int busiest, double limit) {
  const double share_given = packing.share_with(relay.given, packing.count(relay.given) + 1);
  const double fall = packing.share(relay.given) - share_given;
  const double rise = packing.share_with(relay.taken, packing.count(relay.taken) - 1) - packing.share(relay.taken);
  auto time = [&](int gpu, double more) {
    return packing.time_with(gpu, packing.load(gpu) + more - (packing.holds(gpu, relay.given) ? fall : 0.0));
  };
  if (packing.holds(busiest, relay.taken)) return false;
  relay.peak = std::max(time(busiest, 0.0), packing.time_with(relay.gpu, packing.load(relay.gpu) + share_given -
                                                                             packing.share(relay.taken)));
  relay.raised = -1;
  for (int holder : packing.gpus(relay.taken)) {
    if (holder == relay.gpu) continue;
    const double after = time(holder, rise);
    if (after < limit) {
      relay.peak = std::max(relay.peak, after);
    } else {
      if (relay.raised >= 0) return false;
      relay.raised = holder;
    }
  }
  return relay.raised >= 0 && relay.peak < limit;
}

// The exchange that brings the raised GPU down furthest; keeps it in best when the whole has a smaller peak.
void pass_on(const Placed& placed, Relay relay, int busiest, Relay& best) {
  const Packing& packing = placed.packing;
  const int raised = relay.raised;
  const double rise = packing.share_with(relay.taken, packing.count(relay.taken) - 1) - packing.share(relay.taken);
  const double load = packing.load(raised) + rise;
  for (int helper = 0; helper < packing.part().num_gpus(); helper++) {
    if (helper == raised || helper == relay.gpu || helper == busiest || packing.time(helper) >= best.peak) continue;
    for (int passed : packing.experts(raised)) {
      if (passed == relay.taken || passed == relay.given || packing.holds(helper, passed)) continue;
      if (!placed.allowed(helper, passed)) continue;
      for (int lighter : packing.experts(helper)) {
        const double less = packing.share(passed) - packing.share(lighter);
        if (less <= 0 || lighter == relay.given || packing.holds(raised, lighter)) continue;
        const double peak = std::max({relay.peak, packing.time_with(raised, load - less),
                                      packing.time_with(helper, packing.load(helper) + less)});
        if (peak >= best.peak || !placed.allowed(raised, lighter)) continue;
        best = relay;
        best.peak = peak, best.passed = passed, best.lighter = lighter, best.helper = helper;
      }
    }
  }
}

}  // namespace

Relay best_relay(const Placed& placed, int busiest) {
  const Packing& packing = placed.packing;
  const Part& part = packing.part();
  Relay best;
  best.peak = packing.time(busiest) * (1 - 1e-12);
  for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
    if (gpu == busiest || part.usable_G[gpu] == 0) continue;
    for (int taken : packing.experts(gpu)) {
      if (!placed.can_spare(taken, gpu)) continue;
      for (int given : packing.experts(busiest)) {
        Relay relay;
        relay.given = given, relay.taken = taken, relay.gpu = gpu;
        if (given == taken || packing.holds(gpu, given) || !lifts_one(packing, relay, busiest, best.peak)) continue;
        pass_on(placed, relay, busiest, best);
      }
    }
  }
  return best;
}

void apply(Placed& placed, const Relay& relay) {
  placed.replace(relay.taken, relay.given, relay.gpu);
  placed.exchange(relay.passed, relay.raised, relay.lighter, relay.helper);
}

}  // namespace eprt::balancer
