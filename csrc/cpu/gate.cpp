#include "cpu/gate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/team.h"

namespace eprt {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr int64_t kMinRowsPerThread = 32;

struct Scratch {
  explicit Scratch(const GateArgs& args)
      : scores(args.experts), choice(args.experts), group_scores(args.n_group), groups(args.topk_group) {}
  std::vector<float> scores, choice, group_scores;
  std::vector<int64_t> groups;
  std::vector<char> taken;
};

// Indices of the k largest values, largest first. A NaN compares larger than nothing and is chosen only if nothing else
// is left or it is the first candidate. So the k indices differ for any input.
void pick_largest(const std::vector<float>& values, int64_t k, std::vector<char>& taken, int64_t* picked) {
  const auto n = static_cast<int64_t>(values.size());
  taken.assign(n, 0);
  for (int64_t i = 0; i < k; ++i) {
    int64_t best = -1;
    for (int64_t j = 0; j < n; ++j) {
      if (!taken[j] && (best < 0 || values[j] > values[best])) best = j;
    }
    taken[best] = 1;
    picked[i] = best;
  }
}

void score_sigmoid(const float* logits, int64_t n, float* scores) {
  for (int64_t e = 0; e < n; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
}

void score_softmax(const float* logits, int64_t n, float* scores) {
  const float largest = *std::max_element(logits, logits + n);
  float sum = 0;
  for (int64_t e = 0; e < n; ++e) sum += scores[e] = std::exp(logits[e] - largest);
  for (int64_t e = 0; e < n; ++e) scores[e] /= sum;
}

// sqrt(log(1 + exp(x))), without overflow.
void score_sqrt_softplus(const float* logits, int64_t n, float* scores) {
  for (int64_t e = 0; e < n; ++e) {
    const float x = logits[e];
    scores[e] = std::sqrt(std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))));
  }
}

void score(const GateArgs& args, const float* logits, float* scores) {
  switch (args.scoring) {
    case Scoring::kSoftmax:
      return score_softmax(logits, args.experts, scores);
    case Scoring::kSigmoid:
      return score_sigmoid(logits, args.experts, scores);
    case Scoring::kSqrtSoftplus:
      return score_sqrt_softplus(logits, args.experts, scores);
  }
}

float group_score(const float* choice, int64_t n, bool sum_of_two) {
  float first = kMasked, second = kMasked;
  for (int64_t e = 0; e < n; ++e) {
    if (choice[e] > first) {
      second = first;
      first = choice[e];
    } else if (choice[e] > second) {
      second = choice[e];
    }
  }
  return sum_of_two && n > 1 ? first + second : first;
}

void mask_groups(const GateArgs& args, Scratch& scratch) {
  const int64_t size = args.experts / args.n_group;
  for (int64_t g = 0; g < args.n_group; ++g) {
    scratch.group_scores[g] = group_score(&scratch.choice[g * size], size, args.scoring != Scoring::kSoftmax);
  }
  pick_largest(scratch.group_scores, args.topk_group, scratch.taken, scratch.groups.data());
  std::sort(scratch.groups.begin(), scratch.groups.end());
  for (int64_t g = 0; g < args.n_group; ++g) {
    if (!std::binary_search(scratch.groups.begin(), scratch.groups.end(), g)) {
      std::fill_n(&scratch.choice[g * size], size, kMasked);
    }
  }
}

void choose(const GateArgs& args, Scratch& scratch, int64_t* expert_idx) {
  scratch.choice = scratch.scores;
  if (args.bias != nullptr) {
    for (int64_t e = 0; e < args.experts; ++e) scratch.choice[e] += args.bias[e];
  }
  if (args.n_group > 1) mask_groups(args, scratch);
  pick_largest(scratch.choice, args.top_k, scratch.taken, expert_idx);
}

void gate_row(const GateArgs& args, int64_t row, Scratch& scratch) {
  const float* logits = args.logits + row * args.experts;
  float* weights = args.weights + row * args.top_k;
  int64_t* expert_idx = args.expert_idx + row * args.top_k;

  score(args, logits, scratch.scores.data());
  if (!args.is_given) choose(args, scratch, expert_idx);

  float sum = 0;
  for (int64_t k = 0; k < args.top_k; ++k) sum += weights[k] = scratch.scores[expert_idx[k]];
  const float divisor = args.normalise ? sum + 1e-20f : 1.0f;
  for (int64_t k = 0; k < args.top_k; ++k) weights[k] = weights[k] / divisor * args.scale;

  if (args.token_id != nullptr && args.token_id[row] < 0) std::fill_n(expert_idx, args.top_k, int64_t{-1});
  if (args.slot == nullptr) return;
  int64_t* slot_idx = args.slot_idx + row * args.top_k;
  for (int64_t k = 0; k < args.top_k; ++k) slot_idx[k] = args.slot[expert_idx[k] < 0 ? args.experts : expert_idx[k]];
}

}  // namespace

void gate_topk(const GateArgs& args, int num_threads) {
  const int64_t team = std::clamp<int64_t>(args.rows / kMinRowsPerThread, 1, std::max(num_threads, 1));
  parallel_for(team, num_threads, [&](int64_t share) {
    Scratch scratch(args);
    for (int64_t row = args.rows * share / team; row < args.rows * (share + 1) / team; ++row) {
      gate_row(args, row, scratch);
    }
  });
}

}  // namespace eprt
