// Low-latency dispatch between nodes in two layers, receiving side: a rank hands on what sources of other nodes have
// sent it for its node, by stores into the same places in which messages of its own node arrive.
#pragma once
#include "low_latency_received.cuh"

#ifdef NODE_RANKS
namespace eprt::low_latency {

static_assert(kRanks <= 1 << (31 - kEntryRankShift), "an entry has no room for its rank");

EPRT_DEVICE bool comes_to_node(const Placement& place, int source, int token) {
  return (place.node_tokens(source)[token / 32] >> (token % 32)) & 1;
}

// Tells the ranks of the node that this source's messages do not come.
EPRT_DEVICE void give_up(const Context& c, uint32_t epoch, int source, int lane) {
  if (lane < kNodeRanks) store_relaxed(given_up_at(c, first_of_node(c.rank) + lane, source), epoch);
}

// The header of a message for a node, as rank r of the node gets it.
EPRT_DEVICE Vec16 header_for(const Context& c, const Vec16& header, int r, int entry, int lane) {
  Vec16 line = header;
  const uint32_t naming = __ballot_sync(kAllLanes, entry >= 0 && entry >> kEntryRankShift == r);
  if (ends_line(lane)) {
    line.w[0] = uint32_t((kRowIsRank ? r : __ffs(naming) - 1) | c.rank << kHanderShift);
    return line;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const bool is_its = int(line.w[i]) >= 0 && int(line.w[i]) >> kEntryRankShift == r;
    line.w[i] = is_its ? line.w[i] & ((1u << kEntryRankShift) - 1) : uint32_t(-1);
  }
  return line;
}

// One warp hands on one part of a token to the ranks of the node that it goes to.
EPRT_DEVICE void hand_on_part(const Context& c, WaitBook* book, uint32_t masked, uint32_t epoch, int source, int token,
                              int number, int lane) {
  MessagePart part;
  if (!await_message(c, book, epoch, source, token, lane) ||
      !wait_part(c, book, inbox_at(c, epoch, source, token), number, epoch, source, lane, part))
    return give_up(c, epoch, source, lane);
  const int of_lane = part.slot(lane), entry = lane < kTopk ? of_lane : -1;
  uint32_t ranks = __reduce_or_sync(kAllLanes, entry >= 0 ? 1u << (entry >> kEntryRankShift) : 0u);
  ranks &= ~(masked >> first_of_node(c.rank));
  for (; ranks; ranks &= ranks - 1) {
    const int r = __ffs(ranks) - 1;
    uint8_t* to = message_at(c, first_of_node(c.rank) + r, epoch, source, token);
#pragma unroll
    for (int q = 0; q < kPartQuads; ++q) {
      const int line = (number * kPartQuads + q) * kWarpLines + lane / kLineLanes;
      uint8_t* at = to + (kHeaderLines + line) * kLineBytes + lane % kLineLanes * 16;
      store_line(line < kPayloadLines ? at : nullptr, part.v[q]);
    }
    if (number != 0) continue;
    const Vec16 header = header_for(c, part.header(), r, entry, lane);
    store_line(lane / kLineLanes < kHeaderLines ? to + lane * 16 : nullptr, header);
  }
}

// Before a warp waits for anything to be handed on to itself.
EPRT_DEVICE void hand_on(const DispatchParams& p, WaitBook* book, const Placement& place, uint32_t epoch, int lane) {
  const Context& c = p.context;
  const uint32_t masked = masked_ranks(c.deadline, lane);
  if (blockIdx.x == 0 && threadIdx.x < kNodeRanks)
    store_relaxed(handing_at(c, first_of_node(c.rank) + threadIdx.x, c.rank), epoch);
  int end = 0;  // after the last token of any source
  if (lane < kBeyond && place.hander(beyond(c, lane)) == c.rank)
    for (int i = 0; i < place.words; ++i)
      if (const uint32_t bits = place.node_tokens(beyond(c, lane))[i]) end = (i + 1) * 32 - __clz(bits);
  const int num_units = __reduce_max_sync(kAllLanes, end) * kBeyond * kParts, stride = gridDim.x * kWarps;
  for (int unit = blockIdx.x + threadIdx.x / kWarp * gridDim.x; unit < num_units; unit += stride) {
    const int item = unit / kParts, source = beyond(c, item % kBeyond), token = item / kBeyond;
    if (place.hander(source) == c.rank && comes_to_node(place, source, token))
      hand_on_part(c, book, masked, epoch, source, token, unit % kParts, lane);
    __syncwarp();
  }
}

// Waits until a part of a message that a rank of this node hands on is there; false if that rank is masked or late, or
// has waited for the source in vain. As wait_part.
EPRT_DEVICE bool wait_handed(const Context& c, WaitBook* book, const Placement& place, uint32_t epoch, int source,
                             int token, int number, int lane, MessagePart& to) {
  const uint8_t* message = message_at(c, c.rank, epoch, source, token);
  if (to.look(message, number, epoch, lane)) return true;
  HandedWait wait = wait_from_now(place.hander(source), source);
  for (int look = 1;; ++look) {
    const uint64_t now = global_timer_ns();  // before the look, see WaitEnd
    const bool there = to.look(message, number, epoch, lane);
    if (!there && look % 64) continue;
    const uint32_t seen = there ? epoch : to.seen(lane);
    if (!there && __any_sync(kAllLanes, load_relaxed(given_up_at(c, c.rank, source)) == epoch)) {
      if (lane == 0) report(c.deadline.failure, kDispatchTokens, source, seen, epoch);
      if (lane == 0) store_relaxed(c.deadline.mask + source, 1u);
      return false;
    }
    const uint32_t unbegun =
        ranks_before(c, 1u << wait.hander, epoch, lane, [&](int rank) { return handing_at(c, c.rank, rank); });
    if (judge_handed(c.deadline, book, wait, unbegun, there, now, kDispatchTokens, seen, epoch) != kAwaited)
      return there;
  }
}

}  // namespace eprt::low_latency
#endif
