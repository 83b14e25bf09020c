// Low-latency combine between nodes in two layers: the rank that handed a token on awaits the rows of its node's ranks,
// and sends the owner their sum; the owner adds the sums of nodes, in their order. So a node's share is rounded once
// for the way, and with EXACT the result has the bits that CPU ranks give (docs/protocol.md).
#pragma once
#include "low_latency_layered.cuh"
#include "low_latency_rows.cuh"

#ifdef NODE_RANKS
namespace eprt::low_latency {

// Where the rows of a token are from, in one node: EXACT: bit k of `wanted` stands for entry k, else bit r for rank r.
struct NodeRows {
  uint32_t wanted;
  int peer, row;  // lane b: of bit b
  float weight;

  // holder: lane k: the rank of entry k, or -1. ranks: those of the node that are not masked. weight: lane k.
  EPRT_DEVICE NodeRows(int holder, uint32_t ranks, float entry_weight, int lane) {
    const bool is_its = holder >= 0 && (ranks >> max(holder, 0)) & 1;
    const uint32_t holders = __reduce_or_sync(kAllLanes, is_its ? 1u << holder : 0u);
    const uint32_t entries = __ballot_sync(kAllLanes, is_its);
    const int its_row = row_of_rank(holder, lane);
    wanted = kExact ? entries : holders;
    peer = kExact ? holder : lane, row = kExact ? lane : its_row;
    weight = kExact ? entry_weight : 1.f;
  }
};

// The sum of a part of these rows, in order, once they are here; at(row): in lines.
template <class At>
EPRT_DEVICE Sum sum_node(const Context& c, WaitBook* book, const Call& call, const NodeRows& rows, int part, int lane,
                         At at) {
  Sum sum = {};
  uint32_t left = rows.wanted;
  while (left) {
    AwaitedRows held;
#pragma unroll
    for (int i = 0; i < kAwaitedRows; ++i) {
      const int b = left ? __ffs(left) - 1 : 0;
      if (left) held.rows |= 1u << i;
      left &= left - 1;
      held.peer[i] = __shfl_sync(kAllLanes, rows.peer, b);
      held.weight[i] = __shfl_sync(kAllLanes, rows.weight, b);
      held.row[i] = at(__shfl_sync(kAllLanes, rows.row, b));
    }
    held.wait(c, book, part, call.epoch, lane);
#pragma unroll
    for (int i = 0; i < kAwaitedRows; ++i)
      if ((held.rows >> i) & 1) add_weighted(sum, held.v + i * kPartFours, held.weight[i]);
  }
  return sum;
}

// ---- the rank that sums --------------------------------------------------------------------------------------------

// row: in lines, as what was summed is, so that only their ends are new.
EPRT_DEVICE void store_as_summed(uint8_t* row, const Part& from, int part, uint32_t epoch, int lane) {
#pragma unroll
  for (int i = 0; i < kPartFours; ++i) {
    const int four = part * kPartFours + i;
    Vec16 line = from[i];
    if (ends_line(lane)) line.w[3] = epoch;
    store_line(four < kRowFours ? row + four * kWarpLineBytes + lane * 16 : nullptr, line);
  }
}

// One warp sums one part of a token that this rank has handed on, and sends it if it is the last part.
EPRT_DEVICE void sum_share(const Context& c, WaitBook* book, const Call& call, int owner, int token, int part,
                           int lane) {
  const uint8_t* message = inbox_at(c, call.dispatch_epoch, owner, token);
  const Vec16 header =
      load_peer_written(message + min(lane / kLineLanes, kHeaderLines - 1) * kLineBytes + lane % kLineLanes * 16);
  const int slot = int(of_entry(header.w[0], header.w[2], lane));
  const float weight = __uint_as_float(of_entry(header.w[1], header.w[3], lane));
  const int holder = lane < kTopk && slot >= 0 ? first_of_node(c.rank) + (slot >> kEntryRankShift) : -1;
  const NodeRows rows(holder, ranks_of_node(c.rank) & ~call.masked, weight, lane);
  const Sum sum = sum_node(c, book, call, rows, part, lane,
                           [&](int row) { return share_at(c, c.rank, call.epoch, owner, token, row); });
  Part rounded;
  round_sum(rounded, sum);
  uint8_t* row = outbox_row(c, set_index(call.epoch, owner), token, 0);
  store_as_summed(row, rounded, part, call.epoch, lane);
  if (!completes_rows(c, owner, call.epoch, token, lane)) return;
  const int node = c.rank / kNodeRanks;
  eprt_wire_put(sum_at(c, call.epoch, token, node), row, kRowBytes, sum_word(c, call.epoch, token, node), call.epoch,
                owner);
  count_crossing(c, 1, lane);
}

// All tokens that this rank has handed on, before a warp waits for sums of other nodes.
EPRT_DEVICE void sum_for_others(const Context& c, WaitBook* book, const Call& call, int lane) {
  const int width = count_words(c), num_words = node_words(c);
  const uint64_t* counts = count_at(c, c.rank, call.dispatch_epoch, 0);  // source 0's; the other sources' follow
  const auto word_of = [&](int source, int i) {  // of the words for the node; 0: they did not come
    const uint64_t word = load_relaxed(counts + source * width + width - num_words + i);
    return uint32_t(word >> 32) == call.dispatch_epoch ? int(word) : 0;
  };
  bool is_its = lane < kRanks && is_beyond(c, lane) && !((call.masked >> lane) & 1);
  if (is_its) is_its = word_of(lane, num_words - 1) == c.rank;
  const uint32_t owners = __ballot_sync(kAllLanes, is_its);
  if (!owners) return;
  const int num_owners = __popc(owners), stride = int(gridDim.x) * kWarps;
  for (int unit = blockIdx.x + threadIdx.x / kWarp * gridDim.x; unit < c.max_tokens * num_owners * kRowParts;
       unit += stride) {
    const int item = unit / kRowParts, token = item / num_owners;
    uint32_t left = owners;
    for (int i = item % num_owners; i; --i) left &= left - 1;
    const int owner = __ffs(left) - 1;
    if ((word_of(owner, token / 32) >> (token % 32)) & 1)
      sum_share(c, book, call, owner, token, unit % kRowParts, lane);
    __syncwarp();
  }
}

// ---- the owner -----------------------------------------------------------------------------------------------------

// Waits until the sum of a node is there; false if the rank that sums is masked or late. Until all ranks of the node
// have begun, it waits for those that have not.
EPRT_DEVICE bool await_sum(const Context& c, WaitBook* book, uint32_t epoch, int hander, int token, int lane) {
  uint64_t* word = sum_word(c, epoch, token, hander / kNodeRanks);
  bool there = __all_sync(kAllLanes, load_acquire_sys(epoch_of(word)) == epoch);
  HandedWait wait = wait_from_now(hander, hander);
  for (int look = 1; !there; ++look) {
    const uint64_t now = global_timer_ns();  // before the look, see WaitEnd
    const uint32_t seen = load_acquire_sys(epoch_of(word));
    there = __all_sync(kAllLanes, seen == epoch);
    if (!there && look % 64) continue;
    const uint32_t seen_first = __shfl_sync(kAllLanes, seen, 0);
    const uint32_t unbegun = ranks_before(c, ranks_of_node(hander), epoch, lane,
                                          [&](int rank) { return epoch_of(begun_word(c, epoch, rank)); });
    const PeerState state = judge_handed(c.deadline, book, wait, unbegun, there, now, kCombineRows, seen_first, epoch);
    if (state == kMasked || state == kLate) return false;
  }
  if (lane == 0) eprt_wire_see(word, epoch);
  __syncwarp();
  return true;
}

// As sum_token.
EPRT_DEVICE void sum_nodes(const CombineParams& p, WaitBook* book, const Call& call, int token, int slot, int part,
                           int lane) {
  const Context& c = p.context;
  const int holder = slot >= 0 ? rank_of(slot, c.num_slots) : -1;
  const float weight = kExact && lane < kTopk ? p.topk_weight[token * kTopk + lane] : 1.f;
  const uint64_t agreed = load_relaxed(agreed_at(c, call.dispatch_epoch));  // of the dispatch: who was sent the token
  const uint32_t not_sent = uint32_t(agreed >> 32) == call.dispatch_epoch ? uint32_t(agreed) : kAllLanes;
  const uint32_t sent = __reduce_or_sync(kAllLanes, holder >= 0 ? 1u << holder : 0u) & ~not_sent;
  Sum sum = {};
  for (int node = 0; node < kNodes; ++node) {
    const int first = node * kNodeRanks;
    if (!(sent & ranks_of_node(first))) continue;
    if (!is_beyond(c, first)) {
      const NodeRows rows(holder, sent & ranks_of_node(first) & ~call.masked, weight, lane);
      const Sum own =
          sum_node(c, book, call, rows, part, lane, [&](int row) { return row_at(c, c.rank, call.epoch, token, row); });
      add_sum(sum, own);
      continue;
    }
    const int hander = named_in_node(c, first, not_sent);
    if ((call.masked >> hander) & 1 || !await_sum(c, book, call.epoch, hander, token, lane)) continue;
    AwaitedRows held;
    held.rows = 1, held.peer[0] = hander, held.row[0] = sum_at(c, call.epoch, token, node);
    held.wait(c, book, part, call.epoch, lane);
    if (held.rows) add_weighted(sum, held.v, 1.f);
  }
  store_sum(p.out + int64_t(token) * kRowVectors * 16, sum, part, lane);
}

}  // namespace eprt::low_latency
#endif
