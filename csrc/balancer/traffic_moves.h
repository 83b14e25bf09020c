// TrafficSearch: single moves on the current placement that save traffic between nodes.
#pragma once

#include <vector>

#include "copy_gains.h"
#include "placed_layer.h"

namespace eprt::balancer {

// kExchange: `given` of GPU `from` is exchanged with `taken` of `gpu`. kCopy: `given` gets one more copy on `gpu`,
// replacing `taken`, or in a free slot if taken is -1.
struct TrafficMove {
  enum Kind { kNone, kExchange, kCopy } kind = kNone;
  double gain = 0.0;  // crossings saved per slot that receives an expert
  int given = -1, taken = -1, from = -1, gpu = -1;
  int cost() const { return kind == kExchange ? 2 : 1; }
};

class TrafficSearch {
 public:
  TrafficSearch(const Problem& problem, const PlacedLayer& placed, const Tokens& tokens, const Incidence& incidence,
                Traffic traffic);

  // Of the most promising moves the one that saves most per slot, counted exactly. No affected GPU exceeds cap.
  TrafficMove best(int moves_left, double cap);
  void apply(PlacedLayer& placed, const TrafficMove& move);

 private:
  uint64_t bit(int gpu) const { return uint64_t{1} << node(gpu); }
  int node(int gpu) const { return gpu / gpus_per_node_; }
  int copies_on(int expert, int node) const;
  double shift(int expert, int from, int to) const;
  uint64_t mask_without(int expert, int gpu) const;
  void propose_copies(double cap);
  void propose_exchanges(double cap);
  bool copy_fits(int given, int taken, int gpu, double cap) const;
  bool exchange_fits(int a, int gpu_a, int b, int gpu_b, double cap) const;
  double exact_gain(const TrafficMove& move);
  template <typename Body>
  void for_tokens_of(const TrafficMove& move, const Body& body);

  int num_nodes_, gpus_per_node_, num_gpus_;
  const Packing& packing_;
  const Tokens& tokens_;
  const Incidence& incidence_;
  Traffic traffic_;
  std::vector<uint64_t> mask_E_;
  CopyGains gains_;
  std::vector<double> cost_T_;
  std::vector<int> mark_T_;
  int round_ = 0;
  std::vector<uint64_t> scratch_;
  std::vector<TrafficMove> proposals_;
};

}  // namespace eprt::balancer
