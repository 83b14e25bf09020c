#include "packing.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "greedy.h"

namespace eprt::balancer {

int Part::num_usable() const { return std::accumulate(usable_G.begin(), usable_G.end(), 0); }

int Part::num_live() const {
  return static_cast<int>(std::count_if(usable_G.begin(), usable_G.end(), [](int usable) { return usable > 0; }));
}

double Part::mean_time() const {
  const double load = std::accumulate(load_E.begin(), load_E.end(), 0.0);
  double speed = 0.0;
  for (int gpu = 0; gpu < num_gpus(); gpu++)
    if (usable_G[gpu] > 0) speed += speed_G[gpu];
  return speed > 0 ? load / speed : 0.0;
}

Packing::Packing(const Part& part)
    : part_(&part),
      num_experts_(part.num_experts()),
      count_E_(num_experts_, 0),
      share_E_(num_experts_, 0.0),
      load_G_(part.num_gpus(), 0.0),
      inverse_speed_G_(part.num_gpus(), 0.0),
      holds_GE_(static_cast<size_t>(part.num_gpus()) * num_experts_, 0),
      experts_G_(part.num_gpus()),
      gpus_E_(num_experts_) {
  for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
    inverse_speed_G_[gpu] = part.speed_G[gpu] > 0 ? 1.0 / part.speed_G[gpu] : 0.0;
    experts_G_[gpu].reserve(part.slots_per_gpu);
  }
}

int Packing::busiest() const {
  int best = 0;
  for (int gpu = 1; gpu < part_->num_gpus(); gpu++)
    if (time(gpu) > time(best)) best = gpu;
  return best;
}

void Packing::set_count(int expert, int count) {
  count_E_[expert] = count;
  share_E_[expert] = count ? share_with(expert, count) : 0.0;
}

// Loads are summed again, not adjusted: rounding errors do not accumulate, and equal states have equal loads.
void Packing::refresh(int gpu) {
  double load = 0.0;
  for (int expert : experts_G_[gpu]) load += share_E_[expert];
  load_G_[gpu] = load;
}

void Packing::refresh_holders(int expert) {
  for (int gpu : gpus_E_[expert]) refresh(gpu);
}

void Packing::place_copy(int expert, int gpu) {
  experts_G_[gpu].push_back(expert);
  gpus_E_[expert].push_back(gpu);
  holds_GE_[static_cast<size_t>(gpu) * num_experts_ + expert] = 1;
  load_G_[gpu] += share_E_[expert];
}

void Packing::add_copy(int expert, int gpu) {
  set_count(expert, count_E_[expert] + 1);
  place_copy(expert, gpu);
  refresh_holders(expert);
}

void Packing::remove_copy(int expert, int gpu) {
  auto& experts = experts_G_[gpu];
  auto& gpus = gpus_E_[expert];
  experts.erase(std::find(experts.begin(), experts.end(), expert));
  gpus.erase(std::find(gpus.begin(), gpus.end(), gpu));
  holds_GE_[static_cast<size_t>(gpu) * num_experts_ + expert] = 0;
  set_count(expert, count_E_[expert] - 1);
  refresh_holders(expert);
  refresh(gpu);
}

void Packing::move_copy(int expert, int from, int to) {
  auto& experts = experts_G_[from];
  experts.erase(std::find(experts.begin(), experts.end(), expert));
  experts_G_[to].push_back(expert);
  *std::find(gpus_E_[expert].begin(), gpus_E_[expert].end(), from) = to;
  holds_GE_[static_cast<size_t>(from) * num_experts_ + expert] = 0;
  holds_GE_[static_cast<size_t>(to) * num_experts_ + expert] = 1;
  refresh(from);
  refresh(to);
}

void Packing::exchange_copies(int a, int gpu_a, int b, int gpu_b) {
  move_copy(a, gpu_a, gpu_b);
  move_copy(b, gpu_b, gpu_a);
}

namespace {

struct Candidate {  // an expert that may get one more copy
  double weight;    // its load per copy
  int index;        // its rank among equals
  int expert;
};

}  // namespace

std::vector<int> replicate(const Part& part) {
  const int num_experts = part.num_experts(), num_live = part.num_live();
  const int first_count = std::min(part.min_copies, num_live);
  std::vector<int> count_E(num_experts, first_count);
  const int spare = part.num_usable() - num_experts * first_count;
  if (spare <= 0 || first_count == num_live) return count_E;
  std::vector<Candidate> candidates(num_experts);
  for (int expert = 0; expert < num_experts; expert++)
    candidates[expert] = {part.load_E[expert] / first_count, part.tie_rank_E[expert], expert};
  std::make_heap(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return heavier(b, a); });
  for (int i = 0; i < spare && !candidates.empty(); i++) {
    Candidate& first = candidates[0];
    const int count = ++count_E[first.expert];
    first.weight = part.load_E[first.expert] / count;
    if (count < num_live)
      sink_first(candidates, heavier<Candidate>);
    else
      drop_first(candidates, heavier<Candidate>);
  }
  return count_E;
}

double lower_bound(const Part& part) {
  const std::vector<int> count_E = replicate(part);
  double fastest = 0.0, largest = 0.0;
  for (int gpu = 0; gpu < part.num_gpus(); gpu++)
    if (part.usable_G[gpu] > 0) fastest = std::max(fastest, part.speed_G[gpu]);
  for (int expert = 0; expert < part.num_experts(); expert++)
    largest = std::max(largest, part.load_E[expert] / count_E[expert]);
  // With unequal speeds copies need not have equal shares: then only the mean is a bound.
  const auto [slow, fast] = std::minmax_element(part.speed_G.begin(), part.speed_G.end());
  return *slow == *fast ? std::max(part.mean_time(), fastest > 0 ? largest / fastest : 0.0) : part.mean_time();
}

namespace {

// For when every GPU with room already holds a copy: a full GPU without a copy moves another expert to a GPU with room
// and takes the copy. Chooses the pair with the smallest peak. Returns false if there is none.
bool place_by_passing_on(Packing& packing, int expert) {
  const int num_gpus = packing.part().num_gpus();
  double best = std::numeric_limits<double>::infinity();
  int best_from = -1, best_to = -1, best_other = -1;
  for (int to = 0; to < num_gpus; to++) {
    if (packing.room(to) <= 0) continue;
    for (int from = 0; from < num_gpus; from++) {
      if (packing.holds(from, expert) || from == to) continue;
      for (int other : packing.experts(from)) {
        if (packing.holds(to, other)) continue;
        const double moved = packing.share(other);
        const double peak = std::max(packing.time_with(to, packing.load(to) + moved),
                                     packing.time_with(from, packing.load(from) - moved + packing.share(expert)));
        if (peak < best) best = peak, best_from = from, best_to = to, best_other = other;
      }
    }
  }
  if (best_from < 0) return false;
  packing.move_copy(best_other, best_from, best_to);
  packing.place_copy(expert, best_from);
  return true;
}

// The minimum number of copies, each on the GPU with most room. Finds a packing whenever one exists, since the degrees
// of this bipartite graph stay as even as possible. Ignores loads; improve() balances them.
Packing pack_by_room(const Part& part) {
  Packing packing(part);
  for (int expert = 0; expert < part.num_experts(); expert++) packing.set_count(expert, part.min_copies);
  for (int expert = 0; expert < part.num_experts(); expert++) {
    for (int copy = 0; copy < part.min_copies; copy++) {
      int best = -1;
      for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
        if (packing.room(gpu) <= 0 || packing.holds(gpu, expert)) continue;
        if (best < 0 || packing.room(gpu) > packing.room(best)) best = gpu;
      }
      if (best < 0) throw std::runtime_error("usable slots are too few or too uneven to hold every expert");
      packing.place_copy(expert, best);
    }
  }
  return packing;
}

}  // namespace

int earliest_gpu(const Packing& packing, int expert, int first_gpu, int end_gpu) {
  int best = -1;
  double best_time = std::numeric_limits<double>::infinity();
  for (int gpu = first_gpu; gpu < end_gpu; gpu++) {
    if (packing.room(gpu) <= 0 || packing.holds(gpu, expert)) continue;
    const double time = packing.time_with(gpu, packing.load(gpu) + packing.share(expert));
    if (time < best_time) best = gpu, best_time = time;
  }
  return best;
}

std::vector<int> set_counts(Packing& packing, const std::vector<int>& count_E) {
  const std::vector<int>& tie_rank_E = packing.part().tie_rank_E;
  const int num_experts = static_cast<int>(count_E.size());
  std::vector<int> by_rank(num_experts);
  std::iota(by_rank.begin(), by_rank.end(), 0);
  auto ranks_before = [&](int a, int b) { return tie_rank_E[a] < tie_rank_E[b]; };
  if (!std::is_sorted(by_rank.begin(), by_rank.end(), ranks_before))
    std::sort(by_rank.begin(), by_rank.end(), ranks_before);
  std::vector<double> share_by_rank;
  for (int expert : by_rank) {
    packing.set_count(expert, count_E[expert]);
    share_by_rank.push_back(packing.share(expert));
  }
  std::vector<int> order;
  for (int place : heaviest_first(share_by_rank)) order.push_back(by_rank[place]);
  return order;
}

void fill_free_slots(Packing& packing) {
  const Part& part = packing.part();
  for (int gpu = 0; gpu < part.num_gpus(); gpu++) {
    while (packing.room(gpu) > 0) {
      int best = -1;
      for (int expert = 0; expert < part.num_experts(); expert++)
        if (!packing.holds(gpu, expert) && (best < 0 || packing.share(expert) > packing.share(best))) best = expert;
      if (best < 0) break;
      packing.add_copy(best, gpu);
    }
  }
}

Packing pack(const Part& part) {
  const std::vector<int> count_E = replicate(part);
  Packing packing(part);
  bool complete = true;
  for (int expert : set_counts(packing, count_E)) {
    for (int copy = 0; copy < count_E[expert] && complete; copy++) {
      const int gpu = earliest_gpu(packing, expert, 0, part.num_gpus());
      if (gpu >= 0)
        packing.place_copy(expert, gpu);
      else
        complete = place_by_passing_on(packing, expert);
    }
  }
  if (!complete) packing = pack_by_room(part);
  fill_free_slots(packing);
  return packing;
}

}  // namespace eprt::balancer
