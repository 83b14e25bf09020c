#include "copy_gains.h"

#include <bit>

namespace eprt::balancer {

CopyGains::CopyGains(const Problem& problem, const Tokens& tokens, const Incidence& incidence, Traffic traffic,
                     std::vector<uint64_t> mask_E)
    : num_nodes_(static_cast<int>(problem.num_nodes)),
      tokens_(tokens),
      incidence_(incidence),
      traffic_(traffic),
      mask_E_(std::move(mask_E)),
      gain_EN_(mask_E_.size() * problem.num_nodes, 0.0),
      loss_EN_(gain_EN_),
      pull_EN_(gain_EN_) {
  for (int token = 0; token < static_cast<int>(tokens.num_tokens); token++) count_token(token, 1.0);
}

void CopyGains::set_nodes(int expert, uint64_t mask) {
  for (int token : incidence_.tokens_E[expert]) count_token(token, -1.0);
  mask_E_[expert] = mask;
  for (int token : incidence_.tokens_E[expert]) count_token(token, 1.0);
}

// Adds or subtracts one token's contribution. An expert costs the token a crossing unless it is on the token's own node
// or, for node copies, on a node that the token must visit for another of its experts.
void CopyGains::count_token(int token, double sign) {
  const double weight = sign * tokens_.weight(token);
  if (num_nodes_ == 2 && !tokens_.node_T && traffic_ == Traffic::kNodeCopies) {
    count_on_two_nodes(token, weight / 2);
    return;
  }
  const uint64_t own = tokens_.node_T ? uint64_t{1} << tokens_.node_T[token] : 0;
  uint64_t once = 0, twice = 0;  // nodes that must be visited for at least one, at least two of the experts
  if (traffic_ == Traffic::kNodeCopies) {
    for (int expert : incidence_.experts_T[token]) {
      if (!std::has_single_bit(mask_E_[expert])) continue;
      twice |= once & mask_E_[expert];
      once |= mask_E_[expert];
    }
  }
  for (int expert : incidence_.experts_T[token]) {
    const uint64_t mask = mask_E_[expert];
    // Nodes visited regardless of this expert.
    const uint64_t free = (std::has_single_bit(mask) ? (once & ~mask) | twice : once) | own;
    const uint64_t hits = mask & free;
    // If the token's node is unknown, the token crosses unless it is on one of the expert's nodes.
    const double others = own ? 0.0 : static_cast<double>(std::popcount(mask)) / num_nodes_;
    const double if_free = 1.0 - others, if_own = own ? 0.0 : 1.0 / num_nodes_;
    double *gain_N = &gain_EN_[at(expert, 0)], *loss_N = &loss_EN_[at(expert, 0)], *pull_N = &pull_EN_[at(expert, 0)];
    for (int node = 0; node < num_nodes_; node++) {
      const double worth = weight * (free >> node & 1 ? if_free : if_own);
      pull_N[node] += worth;
      if (!(mask >> node & 1)) {
        if (hits == 0) gain_N[node] += worth;
      } else if ((hits & ~(uint64_t{1} << node)) == 0) {
        loss_N[node] += weight * (hits ? if_free + if_own : if_own);
      }
    }
  }
}

// With two nodes: a token on either node crosses unless that node has all of its experts. This is exact.
void CopyGains::count_on_two_nodes(int token, double weight) {
  int missing_N[2] = {0, 0};
  for (int expert : incidence_.experts_T[token])
    for (int node = 0; node < 2; node++) missing_N[node] += !(mask_E_[expert] >> node & 1);
  for (int expert : incidence_.experts_T[token]) {
    for (int node = 0; node < 2; node++) {
      const bool here = mask_E_[expert] >> node & 1;
      if (missing_N[node] > !here) continue;  // other experts are missing too
      pull_EN_[at(expert, node)] += weight;
      (here ? loss_EN_ : gain_EN_)[at(expert, node)] += weight;
    }
  }
}

}  // namespace eprt::balancer
