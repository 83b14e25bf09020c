// The two halves of a decoder layer for a step of decodes, each in one call: latent attention between its norms, and a
// mixture of experts whose experts are all here. Bit for bit what the operators give one after another. Loops that do
// not need each other's results run as one, and loops of few values on the caller alone: at one row a layer's loops
// take less time than the threads need to begin and end them.
#pragma once

#include <cstdint>

#include "cpu/gate.h"
#include "cpu/gemm.h"
#include "cpu/mla.h"
#include "cpu/rowwise.h"

namespace eprt {

struct Projection {
  Matrix w;
  const float* bias;  // [w.n] or null
};

struct NormWeight {
  const void* data;  // null: there is none
  Dtype type;
  float eps;
};

// h, sum = norm and sum of x + attention(norm(x)).
struct AttendDecodesArgs {
  Rows x;  // [rows, hidden]
  int64_t rows;
  NormWeight norm;
  Projection qkv_a;   // rows of the queries, or of their latents where there is a q_norm, then of the cache entries
  NormWeight q_norm;  // of the queries' latents
  Projection q_b;     // from these to the queries; used with q_norm alone
  LatentInsertArgs insert;  // without kv, kv_row, kv_type, rows and num_threads, which follow from the others
  MlaArgs mla;  // likewise without the queries and the output; of the queries heads, nope, rope and value are needed
  Projection o;
  NormWeight next_norm;
  void* h;  // [rows, hidden], of x's type, as is sum
  void* sum;
  int num_threads;
};

// The first slot, position (plus rows) or request (plus twice the rows) that lies outside of its table, pool or pages:
// nothing is written then. -1: all is done.
int64_t attend_decodes(const AttendDecodesArgs& args);

// y = experts(h) + shared expert(h), and what was chosen.
struct MixDecodesArgs {
  Rows h;  // [rows, hidden], of rows * top_k <= kMostExpertRows
  int64_t rows;
  Matrix gate;    // [experts, hidden]
  GateArgs rule;  // with token_id, slot and expert_idx; logits, weights and slot_idx are made here
  int64_t num_slots;
  const int32_t* matrix_of_slot;  // [num_slots]
  int64_t num_matrices;
  Matrix w13, w2;
  Matrix shared_w13, shared_w2;  // data null: there is no shared expert
  int64_t* load;                 // [num_slots], to which the rows of each slot are added
  void* y;                       // [rows, hidden] of h's type
  int num_threads;
};

constexpr int64_t kMostExpertRows = 1024, kMostTopK = 64;

struct MixedDecodes {
  int64_t num_tokens;  // that some expert got; -1: a chosen slot or its matrix does not exist, y and load are as before
  int64_t compute_ns;  // in the routed experts
};

MixedDecodes mix_decodes(const MixDecodesArgs& args);

}  // namespace eprt
