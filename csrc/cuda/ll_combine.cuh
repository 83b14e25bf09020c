// Parameters of the low-latency combine.
//
// Compile-time constants, besides those of low_latency.cuh: EXACT (0, 1: a row per expert crosses, and its owner
// weights it), LATE_WEIGHTS (0, 1: combine is told the gate weights, not dispatch; only in a launch of both phases).
#pragma once
#include "low_latency.cuh"

namespace eprt::low_latency {

constexpr bool kExact = EXACT;
constexpr bool kLateWeights = LATE_WEIGHTS;
static_assert(!kExact || kRows >= kTopk, "an expert's row lies beyond a token's rows");
static_assert(!kExact || !kLateWeights, "with EXACT owners apply their weights themselves");

struct CombineParams {
  Context context;
  Handle handle;
  const uint8_t* y;          // bf16 [rows, H]
  const void* topk_slot;     // the owner's own [T, K]
  const float* topk_weight;  // the owner's own [T, K], read with EXACT or LATE_WEIGHTS only
  uint8_t* out;              // bf16 [T, H]
  const int32_t* slot_rows;  // [L] rows of each local slot, read with `signal` only
  uint32_t* signal;          // [L * slot_tiles] rows-ready counters, or null
  int64_t* wait_cost;        // [R]: the caller's own totals of waiting, ns, or null
  int32_t num_tokens;
  int32_t slot_bytes;
  int32_t phases;
  int32_t block_m;     // rows of a tile
  int32_t slot_tiles;  // tiles of a slot in `signal`
  uint32_t threshold;  // a tile is ready when its counter has reached this
};

EPRT_DEVICE int own_slot(const CombineParams& p, int i) {
  const int64_t slot =
      p.slot_bytes == 8 ? static_cast<const int64_t*>(p.topk_slot)[i] : static_cast<const int32_t*>(p.topk_slot)[i];
  return slot >= 0 && slot < p.context.num_slots * kRanks ? int(slot) : -1;
}

}  // namespace eprt::low_latency
