// From router logits to chosen experts and their weights. Rows are computed one at a time, so that a row's choice
// depends on that row alone: vector code with a scalar tail would round a score differently at different places of a
// batch.
#pragma once

#include <cstdint>

namespace eprt {

enum class Scoring : int64_t { kSoftmax, kSigmoid, kSqrtSoftplus };

struct GateArgs {
  const float* logits;  // [rows, experts]
  const float* bias;    // [experts] or null; added to the scores for the choice only
  int64_t rows, experts;
  int64_t top_k;
  int64_t n_group, topk_group;  // n_group divides experts
  Scoring scoring;              // of softmax a group's score is its best, of the others the sum of its two best
  bool normalise;               // divide the chosen weights by their sum
  float scale;                  // then multiply them
  float* weights;               // [rows, top_k]
  int64_t* expert_idx;          // [rows, top_k], best first, ties to the lowest index
  bool is_given;                // expert_idx is read, not written: only the weights are wanted
};

void gate_topk(const GateArgs& args, int num_threads);

}  // namespace eprt
