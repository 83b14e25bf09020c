// LATE_WEIGHTS: gate weights that only combine is told. Owners send them before all else; the experts' ranks sum with
// them. A rank that waits for one owner's weights serves other owners' tokens first: they would otherwise take it for
// late.
#pragma once
#include "low_latency_combine.cuh"

namespace eprt::low_latency {

constexpr uint64_t kPatienceNs = 5000;  // how long a warp waits before it turns to other owners' tokens

// All weights of this rank's tokens go to every rank, whichever tokens it holds: a few KB, and correct even if entries
// were masked since dispatch. A unit is 32 pairs of neighbouring weights for one rank, a pair per lane.
struct WeightUnits {
  int pairs, warps_per_rank, count;  // pairs per rank; units per rank; units of all ranks
  EPRT_DEVICE explicit WeightUnits(const CombineParams& p)
      : pairs(ceil_div(p.num_tokens * kTopk, 2)),
        warps_per_rank(ceil_div(pairs, kWarp)),
        count(warps_per_rank * kRanks) {}
};

struct WeightPair {
  OwnSlot slot[2];
  float weight[2];
};

EPRT_DEVICE WeightPair load_weights(const CombineParams& p, const WeightUnits& units, int warp_unit, int lane) {
  WeightPair pair;
  if (warp_unit >= units.count) return pair;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int entry = min((warp_unit % units.warps_per_rank * kWarp + lane) * 2 + i, p.num_tokens * kTopk - 1);
    pair.slot[i].load(p, entry);
    pair.weight[i] = p.topk_weight[entry];
  }
  return pair;
}

EPRT_DEVICE void store_weights(const CombineParams& p, const WeightUnits& units, uint32_t epoch, int warp_unit,
                               const WeightPair& pair, uint32_t masked, int lane) {
  const Context& c = p.context;
  const int holder = (c.rank + 1 + warp_unit / units.warps_per_rank) % kRanks;
  const int i = warp_unit % units.warps_per_rank * kWarp + lane;
  if (i >= units.pairs || (masked >> holder) & 1) return;
  uint64_t word[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {  // an entry that was masked since dispatch has weight 0
    const float weight = pair.slot[k].value(p) >= 0 ? pair.weight[k] : 0.f;
    word[k] = uint64_t(epoch) << 32 | __float_as_uint(weight);
  }
  store_relaxed(weights_at(c, holder, epoch, c.rank) + i * 2, word[0], word[1]);
}

// pair: of the warp's first unit. Nothing has been waited for yet.
EPRT_DEVICE void send_weights(const CombineParams& p, const WeightUnits& units, uint32_t epoch, uint32_t masked,
                              WeightPair pair, int warp_unit, int lane) {
  const int stride = int(gridDim.x) * kWarps;
  for (; warp_unit < units.count; warp_unit += stride) {
    store_weights(p, units, epoch, warp_unit, pair, masked, lane);
    pair = load_weights(p, units, warp_unit + stride, lane);
  }
}

// Lane k < K: the weight of entry k, as far as it was seen.
struct LateWeight {
  uint64_t seen = 0;

  // One 8-byte store wrote both: who sees the epoch sees the weight.
  EPRT_DEVICE bool here(uint32_t epoch) const { return uint32_t(seen >> 32) == epoch; }
  EPRT_DEVICE float value() const { return __uint_as_float(uint32_t(seen)); }
};

// Polls until every lane that wants its weight has it, or until kPatienceNs after the start of the send. word: of this
// lane.
EPRT_DEVICE bool wait_weights(uint64_t begin_ns, uint32_t epoch, const uint64_t* word, LateWeight& weight,
                              bool wanted) {
  for (;;) {
    if (wanted) weight.seen = load_relaxed(word);
    if (__all_sync(kAllLanes, !wanted || weight.here(epoch))) return true;
    if (__any_sync(kAllLanes, global_timer_ns() - begin_ns > kPatienceNs)) return false;
  }
}

// The late owners (a bit per rank) whose weights may still arrive. At the deadline owners are reported and masked.
EPRT_DEVICE uint32_t still_late(const Context& c, WaitBook* book, uint64_t begin_ns, uint32_t epoch, uint32_t late,
                                int lane) {
  const uint64_t waited = global_timer_ns() - begin_ns;
  bool waits = (late >> lane) & 1 && !is_masked(c.deadline, lane, waited);
  if (waits && kStats && book->kept) note_wait_ns(book, lane, waited);
  if (waits && waited > c.deadline.timeout_ns) {
    report(c.deadline.failure, kCombineWeights, lane, load_relaxed(weights_at(c, c.rank, epoch, lane)) >> 32, epoch);
    store_relaxed(c.deadline.mask + lane, 1u);
    waits = false;
  }
  __nanosleep(200);
  return __ballot_sync(kAllLanes, waits);
}

}  // namespace eprt::low_latency
