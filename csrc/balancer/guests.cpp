#include "guests.h"

#include <bit>

namespace eprt::balancer {

Guests::Guests(const Problem& problem, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
               const std::vector<int>& home_E)
    : num_nodes_(static_cast<int>(problem.num_nodes)),
      tokens_(tokens),
      incidence_(incidence),
      traffic_(traffic),
      mask_E_(home_E.size()),
      gain_EN_(home_E.size() * problem.num_nodes, 0.0) {
  for (size_t expert = 0; expert < home_E.size(); expert++) mask_E_[expert] = uint64_t{1} << home_E[expert];
  for (int token = 0; token < static_cast<int>(tokens.num_tokens); token++) count(token, 1.0);
}

void Guests::add(int expert, int node) {
  for (int token : incidence_.tokens_E[expert]) count(token, -1.0);
  mask_E_[expert] |= uint64_t{1} << node;
  for (int token : incidence_.tokens_E[expert]) count(token, 1.0);
}

// One token's share of the gains. An expert costs the token a crossing unless the token's own node holds it or, for
// node copies, a node that the token must visit for another of its experts does. A copy where it need not cross saves
// that.
void Guests::count(int token, double sign) {
  const double weight = sign * tokens_.weight(token);
  const uint64_t own = tokens_.node_T ? uint64_t{1} << tokens_.node_T[token] : 0;
  for (int expert : incidence_.experts_T[token]) {
    const uint64_t mask = mask_E_[expert];
    uint64_t visited = 0;  // for the others' sake, whatever this expert does
    if (traffic_ == Traffic::kNodeCopies) {
      for (int other : incidence_.experts_T[token])
        if (other != expert && std::has_single_bit(mask_E_[other])) visited |= mask_E_[other];
    }
    if (mask & (visited | own)) continue;
    double* gain_N = &gain_EN_[static_cast<size_t>(expert) * num_nodes_];
    // With the token's node unknown: it crosses unless it happens to be on one of the expert's nodes.
    const double if_visited = own ? 1.0 : 1.0 - static_cast<double>(std::popcount(mask)) / num_nodes_;
    const double if_own = own ? 0.0 : 1.0 / num_nodes_;
    for (int node = 0; node < num_nodes_; node++)
      if (!(mask >> node & 1)) gain_N[node] += weight * ((visited | own) >> node & 1 ? if_visited : if_own);
  }
}

}  // namespace eprt::balancer
