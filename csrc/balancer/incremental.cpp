#include "incremental.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "compound_move.h"
#include "placed_layer.h"
#include "plan.h"
#include "traffic_moves.h"
#include "weights.h"

namespace eprt::balancer {
namespace {

// Drops copies from GPUs that hold more than they may now: first experts with other copies, smallest shares first.
void drop_surplus(PlacedLayer& placed) {
  const Part& part = placed.packing.part();
  for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
    while (placed.packing.room(gpu) < 0) {
      const auto& experts = placed.packing.experts(gpu);
      const int least = *std::min_element(experts.begin(), experts.end(), [&](int a, int b) {
        const bool only_a = placed.packing.count(a) <= part.min_copies,
                   only_b = placed.packing.count(b) <= part.min_copies;
        return only_a != only_b ? only_b : placed.packing.share(a) < placed.packing.share(b);
      });
      placed.drop_copy(least, gpu);
    }
  }
}

// Adds a copy of an expert that has too few, on the GPU that finishes earliest: in a free slot, or replacing a copy
// that can be spared. Returns false if no GPU can take it.
bool restore_copy(PlacedLayer& placed, int expert) {
  const Packing& packing = placed.packing;
  const Part& part = packing.part();
  const double share = packing.share_with(expert, packing.count(expert) + 1);
  double best = std::numeric_limits<double>::infinity();
  int best_gpu = -1, best_taken = -1;
  for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
    if (part.usable_G[gpu] == 0 || packing.holds(gpu, expert) || !placed.may_move_to(gpu, expert)) continue;
    if (packing.room(gpu) > 0) {
      const double time = packing.time_with(gpu, packing.load(gpu) + share);
      if (time < best) best = time, best_gpu = gpu, best_taken = -1;
      continue;
    }
    for (int taken : packing.experts(gpu)) {
      if (!placed.can_spare(taken, gpu)) continue;
      const double time = packing.time_with(gpu, packing.load(gpu) + share - packing.share(taken));
      if (time < best) best = time, best_gpu = gpu, best_taken = taken;
    }
  }
  if (best_gpu < 0) return false;
  if (best_taken < 0)
    placed.add_copy(expert, best_gpu);
  else
    placed.replace_copy(best_taken, expert, best_gpu);
  return true;
}

void restore_missing(PlacedLayer& placed) {
  const Part& part = placed.packing.part();
  std::vector<int> order(part.num_experts());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return part.load_E[a] > part.load_E[b]; });
  for (int copies = 1; copies <= part.min_copies; copies++) {
    for (int expert : order) {
      if (placed.packing.count(expert) >= copies || restore_copy(placed, expert)) continue;
      placed.allow_everywhere(expert);  // its nodes have no slot left
      if (!restore_copy(placed, expert))
        throw std::runtime_error("layer " + std::to_string(placed.layer()) + ": no slot can be spared for expert " +
                                 std::to_string(expert));
    }
  }
}

struct Move {
  enum Kind { kNone, kExchange, kReplace, kFill, kShift } kind = kNone;
  double score = 0.0;  // decrease of the potential per slot that receives an expert
  double peak = 0.0;   // largest time among the affected GPUs, afterwards
  int given = -1, taken = -1, gpu = -1;
  int cost() const { return kind == kExchange ? 2 : 1; }
};

// The busiest GPU that is not stuck; -1 if all are.
int busiest_not_stuck(const Packing& packing, const std::vector<uint8_t>& stuck_G) {
  int busiest = -1;
  for (int gpu = 0; gpu < packing.part().num_gpus(); gpu++)
    if (!stuck_G[gpu] && (busiest < 0 || packing.time(gpu) > packing.time(busiest))) busiest = gpu;
  return busiest;
}

// Finds the move of one busy GPU's experts that lowers the potential, the sum of (time / mean)^16, most per slot. The
// 16th power is a smooth maximum: it accounts for all GPUs near the maximum, not only for the largest.
class MoveChooser {
 public:
  MoveChooser(const PlacedLayer& placed, int busiest)
      : placed_(placed),
        packing_(placed.packing),
        part_(packing_.part()),
        busiest_(busiest),
        inverse_mean_(1.0 / part_.mean_time()),
        before_G_(part_.num_gpus()) {
    for (int gpu = 0; gpu < part_.num_gpus(); gpu++) before_G_[gpu] = potential(packing_.time(gpu));
  }

  Move best(int64_t moves_left) {
    for (int gpu = 0; gpu < part_.num_gpus(); gpu++) {
      if (gpu == busiest_ || part_.usable_G[gpu] == 0) continue;
      for (int given : packing_.experts(busiest_)) {
        if (packing_.holds(gpu, given)) continue;
        if (packing_.room(gpu) > 0) {
          consider_copy(Move::kFill, given, -1, gpu);
          if (placed_.may_move_to(gpu, given)) consider_exchange(Move::kShift, given, -1, gpu);
          continue;
        }
        for (int taken : packing_.experts(gpu))
          if (placed_.can_spare(taken, gpu)) consider_copy(Move::kReplace, given, taken, gpu);
      }
      if (moves_left >= 2) consider_best_exchange(gpu);
    }
    return best_;
  }

  double smooth_maximum() const {
    const double sum = std::accumulate(before_G_.begin(), before_G_.end(), 0.0);
    return std::pow(sum / part_.num_live(), 1.0 / 16) / inverse_mean_;
  }

 private:
  double potential(double time) const {
    double x = time * inverse_mean_;
    x *= x, x *= x, x *= x;
    return x * x;
  }

  void consider(Move move, double fall) {
    move.score = fall / move.cost();
    if (move.score > best_.score * (1 + 1e-12) && move.score > 0) best_ = move;
  }

  // Of all possible exchanges with one GPU only the one that brings the two times closest: for GPUs of equal speed the
  // decrease of the potential depends on that alone.
  void consider_best_exchange(int gpu) {
    const double here = packing_.time(busiest_), there = packing_.time(gpu);
    const double ideal = (here - there) / (packing_.time_with(busiest_, 1.0) + packing_.time_with(gpu, 1.0));
    double closest = ideal;  // |less - ideal| must be below this, or the larger time would not decrease
    int best_given = -1, best_taken = -1;
    for (int given : packing_.experts(busiest_)) {
      const double share = packing_.share(given);
      if (packing_.holds(gpu, given) || !placed_.may_move_to(gpu, given)) continue;
      for (int taken : packing_.experts(gpu)) {
        const double off = std::abs(share - packing_.share(taken) - ideal);
        if (off >= closest || packing_.holds(busiest_, taken) || !placed_.may_move_to(busiest_, taken)) continue;
        closest = off, best_given = given, best_taken = taken;
      }
    }
    if (best_given >= 0) consider_exchange(Move::kExchange, best_given, best_taken, gpu);
  }

  // `given` moves from the busiest GPU to `gpu`, in exchange for `taken` or into a free slot.
  void consider_exchange(Move::Kind kind, int given, int taken, int gpu) {
    const double less = packing_.share(given) - (taken < 0 ? 0.0 : packing_.share(taken));
    if (less <= 0) return;
    const double here = packing_.time_with(busiest_, packing_.load(busiest_) - less);
    const double there = packing_.time_with(gpu, packing_.load(gpu) + less);
    if (std::max(here, there) >= packing_.time(busiest_)) return;
    consider({kind, 0.0, std::max(here, there), given, taken, gpu},
             before_G_[busiest_] + before_G_[gpu] - potential(here) - potential(there));
  }

  // `given` gets one more copy on `gpu`, in a free slot or replacing `taken`.
  void consider_copy(Move::Kind kind, int given, int taken, int gpu) {
    const double share = packing_.share_with(given, packing_.count(given) + 1);
    const double fall = packing_.share(given) - share;
    double rise = 0.0, gpu_load = packing_.load(gpu) + share;
    double sum = before_G_[gpu], peak = 0.0;
    auto touch = [&](int holder, double load) {
      const double time = packing_.time_with(holder, load);
      sum += before_G_[holder] - potential(time);
      peak = std::max(peak, time);
    };
    if (taken >= 0) {
      rise = packing_.share_with(taken, packing_.count(taken) - 1) - packing_.share(taken);
      gpu_load -= packing_.share(taken);
      for (int holder : packing_.gpus(taken))
        if (holder != gpu) touch(holder, packing_.load(holder) + rise - (packing_.holds(holder, given) ? fall : 0.0));
    }
    for (int holder : packing_.gpus(given))
      if (taken < 0 || !packing_.holds(holder, taken)) touch(holder, packing_.load(holder) - fall);
    const double time = packing_.time_with(gpu, gpu_load);
    sum -= potential(time);
    peak = std::max(peak, time);
    if (peak < packing_.time(busiest_)) consider({kind, 0.0, peak, given, taken, gpu}, sum);
  }

  const PlacedLayer& placed_;
  const Packing& packing_;
  const Part& part_;
  int busiest_;
  double inverse_mean_;
  std::vector<double> before_G_;
  Move best_;
};

void apply(PlacedLayer& placed, const Move& move, int busiest) {
  switch (move.kind) {
    case Move::kExchange:
      return placed.exchange_copies(move.given, busiest, move.taken, move.gpu);
    case Move::kReplace:
      return placed.replace_copy(move.taken, move.given, move.gpu);
    case Move::kFill:
      return placed.add_copy(move.given, move.gpu);
    case Move::kShift:
      return placed.move_copy(move.given, busiest, move.gpu);
    case Move::kNone:
      return;
  }
}

// With so few slots per GPU the busiest GPU is often stuck while the next busiest ones can still be improved, and any
// of them may be the busiest in the next window. With more slots some single move always helps.
constexpr int kFewSlots = 4;
constexpr int kMaxStuck = 8;

// Repairs, then the best moves for balance until the busiest GPU reaches `target` or no move is worthwhile. Returns how
// many slots the moves changed.
int64_t balance_layer(PlacedLayer& placed, const Budget& budget, double target) {
  drop_surplus(placed);
  restore_missing(placed);
  placed.end_step(Change::kRepair, 0.0);
  const double mean = placed.packing.part().mean_time();
  int64_t moved = 0;
  std::vector<uint8_t> stuck_G(placed.packing.part().num_gpus(), 0);
  int num_stuck = 0;
  while (moved < budget.max_moves && mean > 0) {
    const int busiest = busiest_not_stuck(placed.packing, stuck_G);
    if (busiest < 0) break;
    MoveChooser chooser(placed, busiest);
    const double before = placed.packing.time(busiest), smooth = chooser.smooth_maximum();
    if (before <= target) break;
    const Move move = chooser.best(budget.max_moves - moved);
    auto worthwhile = [&](double peak, int cost) { return before - peak >= budget.min_gain * mean * cost; };
    if (move.kind != Move::kNone && worthwhile(move.peak, move.cost())) {
      apply(placed, move, busiest);
      moved += move.cost();
    } else {
      if (placed.packing.part().slots_per_gpu > kFewSlots || moved + CompoundMove::kCost > budget.max_moves) break;
      const CompoundMove compound = best_compound_move(placed, busiest);
      if (compound.given < 0 || !worthwhile(compound.peak, CompoundMove::kCost)) {
        if (++num_stuck > kMaxStuck) break;
        stuck_G[busiest] = 1;
        continue;
      }
      apply(placed, compound);
      moved += CompoundMove::kCost;
    }
    placed.end_step(Change::kBalance, smooth - MoveChooser(placed, busiest).smooth_maximum());
  }
  return moved;
}

// The largest GPU time under slot weights after the first num_steps steps.
double largest_time_after(const Problem& problem, int64_t layer, const Part& part, const int64_t* current_P,
                          const std::vector<Change>& changes, int64_t num_steps) {
  std::vector<int64_t> slot_P(current_P, current_P + problem.num_slots());
  for (const Change& change : changes)
    if (change.step < num_steps) slot_P[change.slot] = change.expert;
  std::vector<double> weight_P(problem.num_slots());
  return fill_weights(problem, layer, slot_P.data(), part.mean_time() * kCloseEnough, false, weight_P.data());
}

std::vector<Change> first_steps(const PlacedLayer& placed, int64_t num_steps) {
  std::vector<Change> changes;
  for (const Change& change : placed.changes)
    if (change.step < num_steps) changes.push_back(change);
  return changes;
}

// Moves are chosen for even shares, but serving uses slot weights, and with them fewer moves may be better. Returns the
// number of steps to keep.
int64_t worthwhile_steps(const Problem& problem, int64_t layer, const Part& part, const int64_t* current_P,
                         const PlacedLayer& placed) {
  auto largest = [&](int64_t num_steps) {
    return largest_time_after(problem, layer, part, current_P, placed.changes, num_steps);
  };
  const int64_t all = placed.num_steps();
  const double with_all = all > 1 ? largest(all) : 0.0, with_repairs = all > 1 ? largest(1) : 0.0;
  if (with_all <= with_repairs) return all;
  int64_t best = 1;
  double best_time = with_repairs;
  for (int64_t steps = 2; steps < all; steps++) {
    const double time = largest(steps);
    if (time < best_time) best = steps, best_time = time;
  }
  return best;
}

}  // namespace

std::vector<Change> improve_placement(const Problem& problem, int64_t layer, const int64_t* current_P,
                                      const Budget& budget, const Tokens* tokens, Traffic traffic, double allowance) {
  const Part part = whole_layer(problem, layer);
  PlacedLayer balanced(problem, layer, part, current_P);
  balance_layer(balanced, budget, 0.0);
  const int64_t balanced_steps = worthwhile_steps(problem, layer, part, current_P, balanced);
  if (!tokens || problem.num_nodes == 1 || tokens->num_tokens == 0) return first_steps(balanced, balanced_steps);
  const double cap = (1 + allowance) * balanced.packing.max_time();
  PlacedLayer placed(problem, layer, part, current_P);
  int64_t moved = balance_layer(placed, budget, cap);
  const int64_t num_balance_steps = placed.num_steps();
  const Incidence incidence(*tokens, part.num_experts());
  TrafficSearch search(problem, placed, *tokens, incidence, traffic);
  const double all_tokens = tokens->total_weight();
  while (moved < budget.max_moves) {
    const TrafficMove move = search.best(static_cast<int>(std::min<int64_t>(budget.max_moves - moved, 2)), cap);
    if (move.kind == TrafficMove::kNone || move.gain < budget.min_gain * all_tokens) break;
    search.apply(placed, move);
    placed.end_step(Change::kTraffic, move.gain * move.cost());
    moved += move.cost();
  }
  // The cap was for even shares, but the allowance is defined for largest times under slot weights: check it again.
  auto largest = [&](const PlacedLayer& one, int64_t num_steps) {
    return largest_time_after(problem, layer, part, current_P, one.changes, num_steps);
  };
  const double limit = (1 + allowance) * largest(balanced, balanced_steps) * (1 + 1e-12);
  int64_t kept = placed.num_steps();
  while (kept >= num_balance_steps && largest(placed, kept) > limit) kept--;
  return kept < num_balance_steps ? first_steps(balanced, balanced_steps) : first_steps(placed, kept);
}

}  // namespace eprt::balancer
