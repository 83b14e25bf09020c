#include "cpu/ep_exchange.h"

#include <algorithm>
#include <cstring>

#include "cpu/team.h"

namespace eprt::ep {
namespace {

constexpr size_t kParallelBytes = size_t{1} << 20;  // smaller work is done before other threads have woken up

// Calls fn(i) for all rows, on this rank's threads if there are many rows.
template <class Fn>
void for_rows(int64_t num_rows, size_t row_bytes, const Fn& fn) {
  parallel_for(num_rows, num_rows * row_bytes > kParallelBytes ? last_team_size() : 1, fn);
}

int64_t slot_at(const Tokens& tokens, int64_t i) {
  return tokens.slot_idx_is_64bit ? static_cast<const int64_t*>(tokens.slot_idx)[i]
                                  : static_cast<const int32_t*>(tokens.slot_idx)[i];
}

}  // namespace

Exchange::Exchange(const Shape& shape, const Topology& topology, const Memory& memory)
    : shape_(shape), topology_(topology), memory_(memory), flights_(shape.num_sets) {
  const int num_local = topology_.ranks_per_node[topology_.node];
  for (int i = 0; i < num_local; ++i)
    segments_.emplace_back(memory_.segments[i], shape_, num_local, memory_.num_blocks[i]);
  for (Flight& flight : flights_) {
    flight.num_rows.resize(num_nodes());
    flight.row_of_token.resize(size_t(num_nodes()) * shape_.num_max_tokens);
  }
  node_slot_begin_.assign(num_nodes() + 1, 0);
  for (int node = 0; node < num_nodes(); ++node)
    node_slot_begin_[node + 1] = node_slot_begin_[node] + num_node_slots(node);
  for (int slot = 0; slot < shape_.num_slots(); ++slot) {
    const int rank = slot / shape_.slots_per_rank;
    flat_slot_.push_back(node_slot_begin_[topology_.node_of_rank[rank]] +
                         topology_.local_index_of_rank[rank] * shape_.slots_per_rank + slot % shape_.slots_per_rank);
  }
  slot_count_.resize(shape_.num_slots());
  slot_cursor_.resize(shape_.num_slots());
  rank_tokens_.resize(shape_.num_ranks);
  last_token_of_rank_.resize(shape_.num_ranks);
  output_of_entry_.resize(size_t(shape_.num_max_tokens) * shape_.top_k);
  link_delay_ns_.assign(shape_.num_ranks, 0);
  alive_.assign(shape_.num_ranks, 1);
  reset_stats();
}

void Exchange::reset_stats() {
  stats_ = Stats{};
  for (auto* totals : {&stats_.dispatch_wait_ns, &stats_.combine_wait_ns, &stats_.recv_tokens, &stats_.sent_tokens})
    totals->assign(shape_.num_ranks, 0);
}

// ---- where blocks and flags are -------------------------------------------------------------------------------------

char* Exchange::block_at(uint64_t epoch, int source) const {
  return segment(topology_.home_segment[source]).block(set_of(epoch), topology_.home_block[source]);
}

Flag* Exchange::source_flag(int source) const {
  return segment(topology_.home_segment[source]).block_flag + topology_.home_block[source];
}

// The block of a source rank for this node, after it has arrived.
Block Exchange::source_block(uint64_t epoch, int source) const {
  char* base = block_at(epoch, source);
  const int num_rows = reinterpret_cast<const BlockHeader*>(base)->num_rows;
  return Block(base, shape_, topology_.ranks_per_node[topology_.node], num_rows);
}

// The block that this rank writes for a node.
Block Exchange::written_block(uint64_t epoch, int node) const {
  const int set = set_of(epoch);
  char* base = node == topology_.node ? block_at(epoch, topology_.rank) : memory_.outgoing[set][node];
  return Block(base, shape_, topology_.ranks_per_node[node], flights_[set].num_rows[node]);
}

size_t Exchange::outgoing_bytes(uint64_t epoch, int node) const { return written_block(epoch, node).bytes; }

// ---- dispatch, sending side -----------------------------------------------------------------------------------------

int64_t Exchange::dispatch_send(uint64_t epoch, const Tokens& tokens, int num_rounds) {
  Flight& f = flight(epoch);
  if (const int64_t bad = count_slots(f, tokens); bad >= 0) return bad;
  f.num_tokens = tokens.num_tokens;
  f.dispatch_wait_start_ns = f.combine_wait_start_ns = 0;

  std::vector<Block> blocks;
  for (int node = 0; node < num_nodes(); ++node) {
    const Block& block = blocks.emplace_back(written_block(epoch, node));
    block.header->epoch = epoch;
    block.header->num_rows = f.num_rows[node];
    block.header->num_rounds = num_rounds;
  }
  write_entries(f, tokens, blocks);
  for (int node = 0; node < num_nodes(); ++node) write_rows(f, tokens, node, blocks[node]);

  blocks[topology_.node].header->publish_ns = count_ns();
  publish(source_flag(topology_.rank), epoch);
  if (!counting_) return -1;
  ++stats_.num_calls;
  for (int rank = 0; rank < shape_.num_ranks; ++rank) stats_.sent_tokens[rank] += rank_tokens_[rank];
  return -1;
}

void Exchange::count_alone(int64_t num_tokens, int64_t compute_ns) {
  if (!counting_) return;
  ++stats_.num_calls;
  stats_.sent_tokens[topology_.rank] += num_tokens;
  stats_.recv_tokens[topology_.rank] += num_tokens;
  stats_.compute_ns += compute_ns;
}

// Counts rows per slot and tokens per rank, and assigns each token its row in each node's block.
int64_t Exchange::count_slots(Flight& f, const Tokens& tokens) {
  std::fill(slot_count_.begin(), slot_count_.end(), 0);
  std::fill(rank_tokens_.begin(), rank_tokens_.end(), 0);
  std::fill(last_token_of_rank_.begin(), last_token_of_rank_.end(), -1);
  std::fill(f.num_rows.begin(), f.num_rows.end(), 0);
  std::fill(f.row_of_token.begin(), f.row_of_token.end(), -1);
  const int num_slots = shape_.num_slots();
  for (int token = 0; token < tokens.num_tokens; ++token) {
    for (int k = 0; k < shape_.top_k; ++k) {
      const int64_t at = int64_t{token} * shape_.top_k + k, slot = slot_at(tokens, at);
      if (slot == -1) continue;
      if (slot < 0 || slot >= num_slots) return at;
      const int rank = static_cast<int>(slot) / shape_.slots_per_rank, node = topology_.node_of_rank[rank];
      if (!alive_[rank]) return at;
      ++slot_count_[flat_slot_[slot]];
      if (last_token_of_rank_[rank] != token) {
        last_token_of_rank_[rank] = token;
        ++rank_tokens_[rank];
      }
      int32_t& row = f.row_of_token[size_t(node) * shape_.num_max_tokens + token];
      if (row < 0) row = f.num_rows[node]++;
    }
  }
  return -1;
}

// A counting sort by slot. Tokens are visited in order, so the entries of a slot are in token order.
void Exchange::write_entries(const Flight& f, const Tokens& tokens, std::vector<Block>& blocks) {
  for (int node = 0; node < num_nodes(); ++node) {
    const int begin = node_slot_begin_[node], num_slots = num_node_slots(node);
    int32_t total = 0;
    for (int i = 0; i < num_slots; ++i) {
      blocks[node].slot_begin[i] = slot_cursor_[begin + i] = total;
      total += slot_count_[begin + i];
    }
    blocks[node].slot_begin[num_slots] = total;
  }
  for (int rank = 0; rank < shape_.num_ranks; ++rank)
    blocks[topology_.node_of_rank[rank]].rank_tokens[topology_.local_index_of_rank[rank]] = rank_tokens_[rank];

  for (int token = 0; token < tokens.num_tokens; ++token) {
    for (int k = 0; k < shape_.top_k; ++k) {
      const int64_t at = int64_t{token} * shape_.top_k + k, slot = slot_at(tokens, at);
      if (slot == -1) continue;
      const int node = topology_.node_of_rank[slot / shape_.slots_per_rank];
      const int32_t entry = f.row_of_token[size_t(node) * shape_.num_max_tokens + token] * shape_.top_k + k;
      blocks[node].entry[slot_cursor_[flat_slot_[slot]]++] = entry;
      blocks[node].weight[entry] = tokens.weights[at];
    }
  }
}

void Exchange::write_rows(const Flight& f, const Tokens& tokens, int node, Block& block) {
  const int32_t* row_of_token = f.row_of_token.data() + size_t(node) * shape_.num_max_tokens;
  const size_t from_bytes = shape_.row_bytes(), to_bytes = shape_.payload_bytes();
  const int num_scales = shape_.num_scales();
  const RowKernels& kernels = row_kernels();
  for_rows(tokens.num_tokens, from_bytes, [&](int64_t token) {
    const int64_t row = row_of_token[token];
    if (row < 0) return;
    const char* from = tokens.x + token * from_bytes;
    char* to = block.rows + row * to_bytes;
    if (shape_.fp8) {
      kernels.quantize(from, shape_.dtype, shape_.hidden, reinterpret_cast<uint8_t*>(to),
                       block.scale + row * num_scales);
    } else {
      std::memcpy(to, from, from_bytes);
    }
  });
}

bool Exchange::forward(uint64_t epoch, int source) {
  auto* header = reinterpret_cast<BlockHeader*>(block_at(epoch, source));
  if (header->epoch != epoch) return false;
  header->publish_ns = now_ns();
  publish(source_flag(source), epoch);
  return true;
}

// ---- dispatch, receiving side ---------------------------------------------------------------------------------------

void Exchange::start_dispatch_wait(uint64_t epoch) {
  int64_t& start_ns = flight(epoch).dispatch_wait_start_ns;
  if (start_ns == 0) start_ns = now_ns();
}

int64_t Exchange::dispatch_ns(uint64_t epoch, int source) const {
  return source_block(epoch, source).header->publish_ns + link_delay_ns_[source];
}

int64_t Exchange::wait_dispatch(uint64_t epoch, bool owns_core, int64_t slice_ns) {
  start_dispatch_wait(epoch);
  const int64_t deadline_ns = now_ns() + slice_ns;
  for (int source = 0; source < shape_.num_ranks; ++source) {
    if (!alive_[source]) continue;
    if (!wait_for(source_flag(source), epoch, owns_core, deadline_ns)) return source;
    if (link_delay_ns_[source] > 0 && !sleep_until(dispatch_ns(epoch, source), deadline_ns)) return source;
  }
  record_dispatch(epoch);
  return -1;
}

void Exchange::record_dispatch(uint64_t epoch) {
  if (!counting_) return;
  const int64_t start_ns = flight(epoch).dispatch_wait_start_ns;
  int64_t longest_ns = 0;
  for (int source = 0; source < shape_.num_ranks; ++source) {
    if (!alive_[source]) continue;
    const Block block = source_block(epoch, source);
    int64_t from_ns = start_ns;
    if (topology_.home_block[source] > 0) {
      // For a forwarded block, the time before the proxy's own dispatch counts as the proxy's, not the source's.
      const char* holder = segment(topology_.home_segment[source]).block(set_of(epoch), 0);
      from_ns = std::max(from_ns, reinterpret_cast<const BlockHeader*>(holder)->publish_ns);
    }
    const int64_t wait_ns = std::max<int64_t>(0, dispatch_ns(epoch, source) - from_ns);
    stats_.dispatch_wait_ns[source] += wait_ns;
    longest_ns = std::max(longest_ns, wait_ns);
    stats_.recv_tokens[source] += block.rank_tokens[topology_.local_index];
  }
  stats_.blocked_ns += longest_ns;
}

int64_t Exchange::count_rows(uint64_t epoch, int32_t* recv_count, int32_t* num_rounds) {
  const Outputs own = outputs(topology_.local_index, set_of(epoch));
  const int num_slots = shape_.slots_per_rank, first = topology_.local_index * num_slots;
  std::fill(recv_count, recv_count + num_slots, 0);
  *num_rounds = 1;
  for (int source = 0; source < shape_.num_ranks; ++source) {
    if (!alive_[source]) continue;
    const Block block = source_block(epoch, source);
    *num_rounds = std::max(*num_rounds, block.header->num_rounds);
    for (int slot = 0; slot < num_slots; ++slot) {
      // Relative to the slot's first row for now.
      own.row_begin[source * shape_.slots_per_rank + slot] = recv_count[slot];
      recv_count[slot] += block.slot_begin[first + slot + 1] - block.slot_begin[first + slot];
    }
  }
  int32_t total = 0;
  for (int slot = 0; slot < num_slots; ++slot) {
    for (int source = 0; source < shape_.num_ranks; ++source)
      own.row_begin[source * shape_.slots_per_rank + slot] += total;
    total += recv_count[slot];
  }
  return flight(epoch).num_received = total;
}

void Exchange::gather(uint64_t epoch, char* x, float* scales) {
  const Outputs own = outputs(topology_.local_index, set_of(epoch));
  const size_t bytes = shape_.payload_bytes();
  const int num_slots = shape_.slots_per_rank, first = topology_.local_index * num_slots;
  const int num_scales = shape_.num_scales(), num_rows = flight(epoch).num_received;
  row_sources_.resize(std::max<size_t>(row_sources_.size(), num_rows));
  for (int source = 0; source < shape_.num_ranks; ++source) {
    if (!alive_[source]) continue;
    const Block block = source_block(epoch, source);
    for (int slot = 0; slot < num_slots; ++slot) {
      RowSource* to = row_sources_.data() + own.row_begin[source * shape_.slots_per_rank + slot];
      for (int i = block.slot_begin[first + slot]; i < block.slot_begin[first + slot + 1]; ++i) {
        const int64_t row = block.entry[i] / shape_.top_k;
        *to++ = {block.rows + row * bytes, block.scale + row * num_scales};
      }
    }
  }
  for_rows(num_rows, bytes, [&](int64_t i) {
    std::memcpy(x + i * bytes, row_sources_[i].row, bytes);
    if (num_scales > 0) std::memcpy(scales + i * num_scales, row_sources_[i].scale, num_scales * sizeof(float));
  });
  flight(epoch).compute_start_ns = count_ns();
}

// ---- combine --------------------------------------------------------------------------------------------------------

void Exchange::combine_send(uint64_t epoch, const char* y) {
  const Flight& f = flight(epoch);
  const Outputs own = outputs(topology_.local_index, set_of(epoch));
  stats_.compute_ns += count_ns() - f.compute_start_ns;
  const size_t bytes = shape_.row_bytes();
  if (y != own.rows)
    for_rows(f.num_received, bytes, [&](int64_t i) { std::memcpy(own.rows + i * bytes, y + i * bytes, bytes); });
  *own.publish_ns = count_ns();
  publish(segment(topology_.local_index).combine, epoch);
}

int64_t Exchange::combine_ns(uint64_t epoch, int rank) const {
  return *outputs(topology_.local_index_of_rank[rank], set_of(epoch)).publish_ns + link_delay_ns_[rank];
}

int64_t Exchange::wait_combine(uint64_t epoch, bool owns_core, int64_t slice_ns) {
  Flight& f = flight(epoch);
  const int64_t start_ns = now_ns();
  if (f.combine_wait_start_ns == 0) f.combine_wait_start_ns = start_ns;
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    if (topology_.node_of_rank[rank] != topology_.node || !alive_[rank]) continue;
    const int local = topology_.local_index_of_rank[rank];
    if (!wait_for(segment(local).combine, epoch, owns_core, start_ns + slice_ns)) return local;
    if (link_delay_ns_[rank] > 0 && !sleep_until(combine_ns(epoch, rank), start_ns + slice_ns)) return local;
  }
  if (!counting_) return -1;
  int64_t longest_ns = 0;
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    if (topology_.node_of_rank[rank] != topology_.node || !alive_[rank]) continue;
    const int64_t wait_ns = std::max<int64_t>(0, combine_ns(epoch, rank) - f.combine_wait_start_ns);
    stats_.combine_wait_ns[rank] += wait_ns;
    longest_ns = std::max(longest_ns, wait_ns);
  }
  stats_.blocked_ns += longest_ns;
  f.blocked_between_nodes_ns = 0;
  f.node_complete_ns = now_ns();
  return -1;
}

void Exchange::locate_outputs(uint64_t epoch, int source, const Block& block) {
  const size_t bytes = shape_.row_bytes();
  std::fill_n(output_of_entry_.begin(), size_t(block.header->num_rows) * shape_.top_k, nullptr);
  for (size_t local = 0; local < segments_.size(); ++local) {
    const Outputs peer = outputs(static_cast<int>(local), set_of(epoch));
    for (int slot = 0; slot < shape_.slots_per_rank; ++slot) {
      const size_t at = local * shape_.slots_per_rank + slot;
      const char* row = peer.rows + peer.row_begin[source * shape_.slots_per_rank + slot] * bytes;
      for (int i = block.slot_begin[at]; i < block.slot_begin[at + 1]; ++i, row += bytes)
        output_of_entry_[block.entry[i]] = row;
    }
  }
}

int Exchange::terms_of_row(const Block& block, int row, Term* terms) const {
  int num_terms = 0;
  for (int at = row * shape_.top_k; at < (row + 1) * shape_.top_k; ++at)
    if (output_of_entry_[at] != nullptr) terms[num_terms++] = {output_of_entry_[at], block.weight[at], shape_.dtype};
  return num_terms;
}

size_t Exchange::sum_forwarded(uint64_t epoch, int source, char* message) {
  const Block block = source_block(epoch, source);
  const Returned to(message, shape_, topology_.ranks_per_node[topology_.node], block.header->num_rows);
  locate_outputs(epoch, source, block);
  const size_t bytes = shape_.row_bytes();
  const RowKernels& kernels = row_kernels();
  for_rows(block.header->num_rows, bytes * shape_.top_k, [&](int64_t row) {
    Term terms[kMaxTopK];
    kernels.weighted_sum(terms, terms_of_row(block, row, terms), shape_.hidden, to.rows + row * bytes, shape_.dtype);
  });
  const int64_t sent_ns = now_ns();
  for (size_t local = 0; local < segments_.size(); ++local)
    to.age_ns[local] = sent_ns - *outputs(static_cast<int>(local), set_of(epoch)).publish_ns;
  *to.epoch = epoch;
  return to.bytes;
}

// Clocks of two hosts differ, so a rank's lateness follows from the message: its arrival minus the age that it states.
// Waiting before this node's outputs were complete is counted already.
bool Exchange::accept_returned(uint64_t epoch, int node) {
  Flight& f = flight(epoch);
  const Returned from(memory_.returned[set_of(epoch)][node], shape_, topology_.ranks_per_node[node], f.num_rows[node]);
  if (*from.epoch != epoch) return false;
  const int64_t waited_ns = now_ns() - f.node_complete_ns;
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    if (topology_.node_of_rank[rank] != node) continue;
    const int64_t age_ns = from.age_ns[topology_.local_index_of_rank[rank]];
    const int64_t wait_ns = std::max<int64_t>(0, waited_ns - age_ns);
    stats_.combine_wait_ns[rank] += wait_ns;
    stats_.blocked_ns += std::max<int64_t>(0, wait_ns - f.blocked_between_nodes_ns);
    f.blocked_between_nodes_ns = std::max(f.blocked_between_nodes_ns, wait_ns);
  }
  return true;
}

void Exchange::sum_own(uint64_t epoch, char* y) {
  const Flight& f = flight(epoch);
  const Block block = source_block(epoch, topology_.rank);
  locate_outputs(epoch, topology_.rank, block);
  const size_t bytes = shape_.row_bytes();
  const RowKernels& kernels = row_kernels();
  std::vector<const char*> returned(num_nodes());
  for (int node = 0; node < num_nodes(); ++node) {
    if (node == topology_.node) continue;
    returned[node] = Returned(memory_.returned[set_of(epoch)][node], shape_, topology_.ranks_per_node[node], 0).rows;
  }
  for_rows(f.num_tokens, bytes * shape_.top_k, [&](int64_t token) {
    Term terms[kMaxTopK];
    const auto row_in = [&](int node) { return f.row_of_token[size_t(node) * shape_.num_max_tokens + token]; };
    const int own_row = row_in(topology_.node);
    const int num_own = own_row < 0 ? 0 : terms_of_row(block, own_row, terms);
    if (num_nodes() == 1) return kernels.weighted_sum(terms, num_own, shape_.hidden, y + token * bytes, shape_.dtype);

    static thread_local std::vector<float> own_sum;
    own_sum.resize(shape_.hidden);
    kernels.weighted_sum(terms, num_own, shape_.hidden, own_sum.data(), Dtype::kFloat32);
    int num_terms = 0;
    for (int node = 0; node < num_nodes(); ++node) {
      const int64_t row = row_in(node);
      if (row < 0) continue;
      terms[num_terms++] = node == topology_.node ? Term{own_sum.data(), 1.0f, Dtype::kFloat32}
                                                  : Term{returned[node] + row * bytes, 1.0f, shape_.dtype};
    }
    kernels.weighted_sum(terms, num_terms, shape_.hidden, y + token * bytes, shape_.dtype);
  });
}

}  // namespace eprt::ep
