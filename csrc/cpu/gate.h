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
  bool is_given;                // expert_idx is read, not chosen: only the weights are wanted
  const int64_t* token_id;      // [rows] or null; of a row whose id is negative, padding, all experts become -1
  const int64_t* slot;          // [experts + 1] or null; the slot of each expert, of -1 the last
  int64_t* slot_idx;            // [rows, top_k], the slots of the chosen; null without slot
};

void gate_topk(const GateArgs& args, int num_threads);

}  // namespace eprt
