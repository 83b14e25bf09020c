#include "traffic_moves.h"

#include <algorithm>
#include <tuple>

namespace eprt::balancer {
namespace {

constexpr size_t kCheap = 16;     // candidates per node for replacement: the copies that cost least to remove
constexpr size_t kPartners = 24;  // candidates per pair of nodes for an exchange: the experts that gain most by moving
constexpr size_t kExact = 24;     // proposals that are counted exactly

std::vector<uint64_t> masks_of(const Packing& packing, int gpus_per_node) {
  std::vector<uint64_t> mask_E(packing.part().num_experts(), 0);
  for (size_t expert = 0; expert < mask_E.size(); expert++)
    for (int gpu : packing.gpus(static_cast<int>(expert))) mask_E[expert] |= uint64_t{1} << (gpu / gpus_per_node);
  return mask_E;
}

template <typename Items>
void keep_first(Items& items, size_t num) {
  const size_t kept = std::min(num, items.size());
  std::partial_sort(items.begin(), items.begin() + static_cast<int64_t>(kept), items.end());
  items.resize(kept);
}

}  // namespace

TrafficSearch::TrafficSearch(const Problem& problem, const PlacedLayer& placed, const Tokens& tokens,
                             const Incidence& incidence, Traffic traffic)
    : num_nodes_(static_cast<int>(problem.num_nodes)),
      gpus_per_node_(static_cast<int>(problem.gpus_per_node())),
      num_gpus_(static_cast<int>(problem.num_gpus)),
      packing_(placed.packing),
      tokens_(tokens),
      incidence_(incidence),
      traffic_(traffic),
      mask_E_(masks_of(placed.packing, gpus_per_node_)),
      gains_(problem, tokens, incidence, traffic, mask_E_),
      cost_T_(tokens.num_tokens),
      mark_T_(tokens.num_tokens, 0) {
  for (int64_t token = 0; token < tokens.num_tokens; token++)
    cost_T_[token] = crossings(tokens, token, traffic, num_nodes_, mask_E_.data(), scratch_);
}

TrafficMove TrafficSearch::best(int moves_left, double cap) {
  proposals_.clear();
  propose_copies(cap);
  if (moves_left >= 2) propose_exchanges(cap);
  auto key = [](const TrafficMove& m) { return std::tuple(-m.gain, m.kind, m.given, m.taken, m.from, m.gpu); };
  std::sort(proposals_.begin(), proposals_.end(),
            [&](const TrafficMove& a, const TrafficMove& b) { return key(a) < key(b); });
  TrafficMove best;
  for (size_t i = 0; i < std::min(kExact, proposals_.size()); i++) {
    TrafficMove move = proposals_[i];
    move.gain = exact_gain(move) / move.cost();
    if (move.gain > best.gain) best = move;
  }
  return best;
}

void TrafficSearch::apply(PlacedLayer& placed, const TrafficMove& move) {
  const int given = move.given, taken = move.taken;
  const uint64_t before_given = mask_E_[given], before_taken = taken >= 0 ? mask_E_[taken] : 0;
  if (move.kind == TrafficMove::kExchange)
    placed.exchange_copies(given, move.from, taken, move.gpu);
  else if (taken >= 0)
    placed.replace_copy(taken, given, move.gpu);
  else
    placed.add_copy(given, move.gpu);
  auto renew = [&](int expert, uint64_t before) {
    uint64_t now = 0;
    for (int gpu : packing_.gpus(expert)) now |= bit(gpu);
    mask_E_[expert] = now;
    for (int at = 0; at < num_nodes_; at++) {  // additions first, so that the expert always has a node
      if ((now & ~before) >> at & 1) gains_.add_copy(expert, at);
    }
    for (int at = 0; at < num_nodes_; at++) {
      if ((before & ~now) >> at & 1) gains_.remove_copy(expert, at);
    }
  };
  renew(given, before_given);
  if (taken >= 0) renew(taken, before_taken);
  for_tokens_of(move, [&](int token) {
    cost_T_[token] = crossings(tokens_, token, traffic_, num_nodes_, mask_E_.data(), scratch_);
  });
}

int TrafficSearch::copies_on(int expert, int at) const {
  const auto& gpus = packing_.gpus(expert);
  return static_cast<int>(std::count_if(gpus.begin(), gpus.end(), [&](int gpu) { return node(gpu) == at; }));
}

// Estimate of the traffic saved by moving a copy from one node to another.
double TrafficSearch::shift(int expert, int from, int to) const {
  if (mask_E_[expert] >> to & 1) return copies_on(expert, from) > 1 ? 0.0 : -gains_.loss(expert, from);
  if (copies_on(expert, from) > 1) return gains_.gain(expert, to);
  if (mask_E_[expert] == uint64_t{1} << from) return gains_.pull(expert, to) - gains_.pull(expert, from);
  return gains_.gain(expert, to) - gains_.loss(expert, from);
}

void TrafficSearch::propose_copies(double cap) {
  const Part& part = packing_.part();
  for (int at = 0; at < num_nodes_; at++) {
    std::vector<std::tuple<double, int, int>> cheap;  // (loss, GPU, expert replaced or -1)
    for (int gpu = at * gpus_per_node_; gpu < (at + 1) * gpus_per_node_; gpu++) {
      if (part.usable_G[gpu] == 0) continue;
      if (packing_.room(gpu) > 0) cheap.emplace_back(0.0, gpu, -1);
      for (int taken : packing_.experts(gpu))
        if (packing_.count(taken) > part.min_copies)
          cheap.emplace_back(copies_on(taken, at) > 1 ? 0.0 : gains_.loss(taken, at), gpu, taken);
    }
    keep_first(cheap, kCheap);
    for (int given = 0; given < part.num_experts(); given++) {
      const double gain = gains_.gain(given, at);
      if (mask_E_[given] >> at & 1 || gain <= 0 || packing_.count(given) == part.num_live()) continue;
      for (const auto& [loss, gpu, taken] : cheap)
        if (gain > loss && copy_fits(given, taken, gpu, cap))
          proposals_.push_back({TrafficMove::kCopy, gain - loss, given, taken, -1, gpu});
    }
  }
}

void TrafficSearch::propose_exchanges(double cap) {
  auto movers = [&](int from, int to) {
    std::vector<std::tuple<double, int, int>> best;  // (-saved, GPU, expert)
    for (int gpu = from * gpus_per_node_; gpu < (from + 1) * gpus_per_node_; gpu++)
      for (int expert : packing_.experts(gpu)) best.emplace_back(-shift(expert, from, to), gpu, expert);
    keep_first(best, kPartners);
    return best;
  };
  for (int one = 0; one < num_nodes_; one++) {
    for (int other = one + 1; other < num_nodes_; other++) {
      const auto there = movers(one, other), back = movers(other, one);
      for (const auto& [cost_a, gpu_a, a] : there)
        for (const auto& [cost_b, gpu_b, b] : back)
          if (cost_a + cost_b < 0 && exchange_fits(a, gpu_a, b, gpu_b, cap))
            proposals_.push_back({TrafficMove::kExchange, -(cost_a + cost_b) / 2, a, b, gpu_a, gpu_b});
    }
  }
}

bool TrafficSearch::exchange_fits(int a, int gpu_a, int b, int gpu_b, double cap) const {
  if (a == b || packing_.holds(gpu_b, a) || packing_.holds(gpu_a, b)) return false;
  const double less = packing_.share(a) - packing_.share(b);
  return packing_.time_with(gpu_a, packing_.load(gpu_a) - less) <= cap &&
         packing_.time_with(gpu_b, packing_.load(gpu_b) + less) <= cap;
}

bool TrafficSearch::copy_fits(int given, int taken, int gpu, double cap) const {
  if (given == taken || packing_.holds(gpu, given)) return false;
  const double share = packing_.share_with(given, packing_.count(given) + 1);
  const double fall = packing_.share(given) - share;
  double load = packing_.load(gpu) + share;
  if (taken >= 0) {
    const double rise = packing_.share_with(taken, packing_.count(taken) - 1) - packing_.share(taken);
    load -= packing_.share(taken);
    for (int holder : packing_.gpus(taken)) {
      if (holder == gpu) continue;
      const double less = packing_.holds(holder, given) ? fall : 0.0;
      if (packing_.time_with(holder, packing_.load(holder) + rise - less) > cap) return false;
    }
  }
  return packing_.time_with(gpu, load) <= cap;
}

uint64_t TrafficSearch::mask_without(int expert, int gpu) const {
  return copies_on(expert, node(gpu)) > 1 ? mask_E_[expert] : mask_E_[expert] & ~bit(gpu);
}

template <typename Body>
void TrafficSearch::for_tokens_of(const TrafficMove& move, const Body& body) {
  round_++;
  for (int expert : {move.given, move.taken}) {
    if (expert < 0) continue;
    for (int token : incidence_.tokens_E[expert]) {
      if (mark_T_[token] == round_) continue;
      mark_T_[token] = round_;
      body(token);
    }
  }
}

double TrafficSearch::exact_gain(const TrafficMove& move) {
  const int given = move.given, taken = move.taken;
  const uint64_t before_given = mask_E_[given], before_taken = taken >= 0 ? mask_E_[taken] : 0;
  if (move.kind == TrafficMove::kExchange) {
    const uint64_t without_a = mask_without(given, move.from), without_b = mask_without(taken, move.gpu);
    mask_E_[given] = without_a | bit(move.gpu), mask_E_[taken] = without_b | bit(move.from);
  } else {
    if (taken >= 0) mask_E_[taken] = mask_without(taken, move.gpu);
    mask_E_[given] |= bit(move.gpu);
  }
  double gain = 0.0;
  for_tokens_of(move, [&](int token) {
    gain += cost_T_[token] - crossings(tokens_, token, traffic_, num_nodes_, mask_E_.data(), scratch_);
  });
  mask_E_[given] = before_given;
  if (taken >= 0) mask_E_[taken] = before_taken;
  return gain;
}

}  // namespace eprt::balancer
