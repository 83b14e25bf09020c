// Parameters of the low-latency combine.
//
// Compile-time constants, besides those of low_latency.cuh: EXACT (0, 1: a row per expert is sent, and the owner
// applies the weights), LATE_WEIGHTS (0, 1: combine is told the gate weights, not dispatch; only in a launch of both
// phases).
#pragma once
#include "low_latency_wire.cuh"

namespace eprt::low_latency {

constexpr bool kExact = EXACT;
constexpr bool kLateWeights = LATE_WEIGHTS;
static_assert(!kExact || kRows >= kTopk, "an expert's row lies beyond a token's rows");
static_assert(!kExact || !kLateWeights, "with EXACT owners apply their weights themselves");
EPRT_WIRED(static_assert(!kLateWeights, "between nodes dispatch is told the weights");)

struct CombineParams {
  Context context;
  Handle handle;
  const uint8_t* y;          // bf16 [rows, H]
  const void* topk_slot;     // the owner's own [T, K]
  const float* topk_weight;  // the owner's own [T, K], read only with EXACT or LATE_WEIGHTS
  uint8_t* out;              // bf16 [T, H]
  const int32_t* slot_rows;  // [L]: rows of each local slot, read only with `signal`
  uint32_t* signal;          // [L * slot_tiles]: counters of finished rows, or null
  int64_t* wait_cost;        // [R]: the caller's own totals of waiting, ns, or null
  int32_t num_tokens;        // T
  int32_t slot_bytes;        // of one topk_slot: 4 or 8
  int32_t phases;            // Phases
  int32_t block_m;           // rows of a tile
  int32_t slot_tiles;        // tiles of a slot in `signal`
  uint32_t threshold;        // a tile is ready when its counter has reached this
};

// An entry of the owner's routing, loaded now and examined later: a branch around the loads would wait for them.
struct OwnSlot {
  int32_t low = -1, high = -1;

  EPRT_DEVICE void load(const CombineParams& p, int i) {
    const int words = p.slot_bytes / 4;
    const int32_t* word = static_cast<const int32_t*>(p.topk_slot) + int64_t(i) * words;
    low = word[0], high = word[words - 1];
  }
  EPRT_DEVICE int value(const CombineParams& p) const {  // -1 for a bad one, which dispatch has reported
    const bool fits = p.slot_bytes == 4 || high == 0;
    return fits && low >= 0 && low < p.context.num_slots * kRanks ? low : -1;
  }
};

}  // namespace eprt::low_latency
