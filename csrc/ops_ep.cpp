// The operators of the EP calls between CPU ranks. The rules of ops.cpp apply.
//
// The caller keeps the memory mapped whose addresses it passes. torch releases the GIL around every operator call.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/ep_checksum.h"
#include "cpu/ep_exchange.h"
#include "cpu/ep_flag.h"

using torch::stable::Tensor;

namespace eprt::ep {
namespace {

// ---- flags and rows -------------------------------------------------------------------------------------------------

Flag* flag_at(int64_t address) { return reinterpret_cast<Flag*>(address); }

int64_t ep_flag_epoch(int64_t flag) { return static_cast<int64_t>(flag_at(flag)->epoch.load()); }
void ep_publish(int64_t flag, int64_t epoch) { publish(flag_at(flag), static_cast<uint64_t>(epoch)); }

int64_t ep_checksum(int64_t address, int64_t num_bytes, int64_t seed) {
  return static_cast<int64_t>(checksum(reinterpret_cast<const void*>(address), num_bytes, seed));
}

// The index of the first flag that is still below the epoch after slice_ns, or -1 when all have reached it.
int64_t ep_wait(Tensor flags, int64_t epoch, bool owns_core, int64_t slice_ns) {
  const auto* addresses = flags.const_data_ptr<int64_t>();
  const int64_t deadline_ns = now_ns() + slice_ns;
  for (int64_t i = 0; i < flags.numel(); ++i) {
    if (!wait_for(flag_at(addresses[i]), static_cast<uint64_t>(epoch), owns_core, deadline_ns)) return i;
  }
  return -1;
}

// out[i] = the row at address rows[i].
void ep_gather_rows(Tensor rows, Tensor out) {
  const auto* addresses = rows.const_data_ptr<int64_t>();
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const size_t row_bytes = out.numel() / rows.numel() * out.element_size();
  for (int64_t i = 0; i < rows.numel(); ++i)
    std::memcpy(to + i * row_bytes, reinterpret_cast<const void*>(addresses[i]), row_bytes);
}

// Publishes own_flag, waits like ep_wait, and gathers the rows when all flags have reached the epoch. May be repeated
// until then.
int64_t ep_exchange_rows(int64_t own_flag, Tensor flags, Tensor rows, Tensor out, int64_t epoch, bool owns_core,
                         int64_t slice_ns) {
  ep_publish(own_flag, epoch);
  const int64_t pending = ep_wait(flags, epoch, owns_core, slice_ns);
  if (pending < 0) ep_gather_rows(rows, out);
  return pending;
}

// ---- layout and set-up ----------------------------------------------------------------------------------------------

// spec: the fields of Shape, in order. The sizes that follow tell the caller how much to allocate.
Shape shape_of(const Tensor& spec) {
  const auto* v = spec.const_data_ptr<int64_t>();
  const auto i = [v](int at) { return static_cast<int>(v[at]); };
  return {i(0), i(1), i(2), i(3), i(4), i(5), static_cast<Dtype>(i(6)), i(7) != 0};
}
int64_t ep_segment_bytes(Tensor spec, int64_t num_node_ranks, int64_t num_blocks) {
  return Segment(nullptr, shape_of(spec), num_node_ranks, num_blocks).bytes;
}
int64_t ep_block_bytes(Tensor spec, int64_t num_node_ranks) { return Block::max_bytes(shape_of(spec), num_node_ranks); }
int64_t ep_returned_bytes(Tensor spec, int64_t num_node_ranks) {
  const Shape shape = shape_of(spec);
  return Returned(nullptr, shape, num_node_ranks, shape.num_max_tokens).bytes;
}

std::vector<int> ints_of(const Tensor& t) {
  const auto* v = t.const_data_ptr<int64_t>();
  return {v, v + t.numel()};
}
std::vector<char*> addresses_of(const Tensor& t) {
  const auto* v = t.const_data_ptr<int64_t>();
  std::vector<char*> addresses;
  for (int64_t i = 0; i < t.numel(); ++i) addresses.push_back(reinterpret_cast<char*>(v[i]));
  return addresses;
}
std::vector<std::vector<char*>> address_rows_of(const Tensor& t, int num_rows) {
  const std::vector<char*> flat = addresses_of(t);
  const size_t width = flat.size() / num_rows;
  std::vector<std::vector<char*>> rows;
  for (int i = 0; i < num_rows; ++i) rows.emplace_back(flat.begin() + i * width, flat.begin() + (i + 1) * width);
  return rows;
}

Topology topology_of(int rank, const Tensor& node_of_rank, const Tensor& homes) {
  Topology topology;
  topology.rank = rank;
  topology.node_of_rank = ints_of(node_of_rank);
  topology.node = topology.node_of_rank[rank];
  for (const int node : topology.node_of_rank) {
    if (node >= static_cast<int>(topology.ranks_per_node.size())) topology.ranks_per_node.resize(node + 1);
    topology.local_index_of_rank.push_back(topology.ranks_per_node[node]++);
  }
  topology.local_index = topology.local_index_of_rank[rank];
  const std::vector<int> flat = ints_of(homes);
  for (size_t i = 0; i < flat.size(); i += 2) {
    topology.home_segment.push_back(flat[i]);
    topology.home_block.push_back(flat[i + 1]);
  }
  return topology;
}

Exchange& exchange_at(int64_t self) { return *reinterpret_cast<Exchange*>(self); }

// homes: [num_ranks, 2]: segment and block of each source rank. segments, num_blocks: [ranks of this node]. outgoing,
// returned: addresses [num_sets, num_nodes].
int64_t ep_open(Tensor spec, int64_t rank, Tensor node_of_rank, Tensor homes, Tensor segments, Tensor num_blocks,
                Tensor outgoing, Tensor returned) {
  const Shape shape = shape_of(spec);
  const Memory memory{addresses_of(segments), ints_of(num_blocks), address_rows_of(outgoing, shape.num_sets),
                      address_rows_of(returned, shape.num_sets)};
  return reinterpret_cast<int64_t>(new Exchange(shape, topology_of(rank, node_of_rank, homes), memory));
}
void ep_close(int64_t self) { delete &exchange_at(self); }

// ---- EP calls -------------------------------------------------------------------------------------------------------

int64_t ep_dispatch_send(int64_t self, int64_t epoch, Tensor x, Tensor slot_idx, Tensor weights, int64_t num_rounds) {
  const Tokens tokens{static_cast<const char*>(x.const_data_ptr()), slot_idx.const_data_ptr(),
                      weights.const_data_ptr<float>(), slot_idx.element_size() == 8, static_cast<int>(x.size(0))};
  return exchange_at(self).dispatch_send(epoch, tokens, num_rounds);
}
int64_t ep_outgoing_bytes(int64_t self, int64_t epoch, int64_t node) {
  return exchange_at(self).outgoing_bytes(epoch, node);
}
void ep_start_dispatch_wait(int64_t self, int64_t epoch) { exchange_at(self).start_dispatch_wait(epoch); }
bool ep_forward(int64_t self, int64_t epoch, int64_t source) { return exchange_at(self).forward(epoch, source); }

void ep_gather(int64_t self, int64_t epoch, Tensor x, Tensor scales) {
  exchange_at(self).gather(epoch, static_cast<char*>(x.mutable_data_ptr()), scales.mutable_data_ptr<float>());
}

// One slice of waiting. Returns a source rank that is still missing, or -1. Then recv_count and info (rows, rounds) are
// filled in, and also x and scales if they hold so many rows.
int64_t ep_dispatch_recv(int64_t self, int64_t epoch, Tensor x, Tensor scales, Tensor recv_count, Tensor info,
                         bool owns_core, int64_t slice_ns) {
  Exchange& exchange = exchange_at(self);
  const int64_t missing = exchange.wait_dispatch(epoch, owns_core, slice_ns);
  if (missing >= 0) return missing;
  int32_t num_rounds;
  auto* out = info.mutable_data_ptr<int64_t>();
  out[0] = exchange.count_rows(epoch, recv_count.mutable_data_ptr<int32_t>(), &num_rounds);
  out[1] = num_rounds;
  if (out[0] <= x.size(0)) ep_gather(self, epoch, x, scales);
  return -1;
}
void ep_combine_send(int64_t self, int64_t epoch, Tensor y) {
  exchange_at(self).combine_send(epoch, static_cast<const char*>(y.const_data_ptr()));
}
int64_t ep_combine_wait(int64_t self, int64_t epoch, bool owns_core, int64_t slice_ns) {
  return exchange_at(self).wait_combine(epoch, owns_core, slice_ns);
}
void ep_sum_own(int64_t self, int64_t epoch, Tensor y) {
  exchange_at(self).sum_own(epoch, static_cast<char*>(y.mutable_data_ptr()));
}
// ep_combine_wait and ep_sum_own in one call, for a group of one node. Returns a local index that is still missing, or
// -1.
int64_t ep_combine_recv(int64_t self, int64_t epoch, Tensor y, bool owns_core, int64_t slice_ns) {
  const int64_t missing = ep_combine_wait(self, epoch, owns_core, slice_ns);
  if (missing < 0) ep_sum_own(self, epoch, y);
  return missing;
}
int64_t ep_sum_forwarded(int64_t self, int64_t epoch, int64_t source, int64_t message) {
  return exchange_at(self).sum_forwarded(epoch, source, reinterpret_cast<char*>(message));
}
bool ep_accept_returned(int64_t self, int64_t epoch, int64_t node) {
  return exchange_at(self).accept_returned(epoch, node);
}
int64_t ep_block_address(int64_t self, int64_t epoch, int64_t source) {
  return reinterpret_cast<int64_t>(exchange_at(self).block_at(epoch, source));
}
int64_t ep_output_address(int64_t self, int64_t epoch) {
  return reinterpret_cast<int64_t>(exchange_at(self).output_rows(epoch));
}

// out: the fields of Stats, one after another.
void ep_stats(int64_t self, Tensor out, bool reset) {
  Exchange& exchange = exchange_at(self);
  const Stats& stats = exchange.stats();
  auto* to = out.mutable_data_ptr<int64_t>();
  for (const auto* totals : {&stats.dispatch_wait_ns, &stats.combine_wait_ns, &stats.recv_tokens, &stats.sent_tokens})
    to = std::copy(totals->begin(), totals->end(), to);
  *to++ = stats.num_calls;
  *to++ = stats.compute_ns;
  *to++ = stats.blocked_ns;
  if (reset) exchange.reset_stats();
}

void ep_set_alive(int64_t self, Tensor alive) { exchange_at(self).set_alive(ints_of(alive)); }

void ep_set_counting(int64_t self, bool on) { exchange_at(self).set_counting(on); }
void ep_count_alone(int64_t self, int64_t num_tokens, int64_t compute_ns) {
  exchange_at(self).count_alone(num_tokens, compute_ns);
}

void ep_delay_link(int64_t self, int64_t source, int64_t delay_ns) {
  exchange_at(self).delay_link(static_cast<int>(source), delay_ns);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eprt, m) {
  m.def("ep_flag_epoch(int flag) -> int");
  m.def("ep_publish(int flag, int epoch) -> ()");
  m.def("ep_checksum(int address, int num_bytes, int seed) -> int");
  m.def("ep_wait(Tensor flags, int epoch, bool owns_core, int slice_ns) -> int");
  m.def("ep_gather_rows(Tensor rows, Tensor(a!) out) -> ()");
  m.def(
      "ep_exchange_rows(int own_flag, Tensor flags, Tensor rows, Tensor(a!) out, int epoch, bool owns_core, "
      "int slice_ns) -> int");
  m.def("ep_segment_bytes(Tensor spec, int num_node_ranks, int num_blocks) -> int");
  m.def("ep_block_bytes(Tensor spec, int num_node_ranks) -> int");
  m.def("ep_returned_bytes(Tensor spec, int num_node_ranks) -> int");
  m.def(
      "ep_open(Tensor spec, int rank, Tensor node_of_rank, Tensor homes, Tensor segments, Tensor num_blocks, Tensor "
      "outgoing, Tensor returned) -> int");
  m.def("ep_close(int self) -> ()");
  m.def("ep_dispatch_send(int self, int epoch, Tensor x, Tensor slot_idx, Tensor weights, int num_rounds) -> int");
  m.def("ep_outgoing_bytes(int self, int epoch, int node) -> int");
  m.def("ep_start_dispatch_wait(int self, int epoch) -> ()");
  m.def("ep_forward(int self, int epoch, int source) -> bool");
  m.def(
      "ep_dispatch_recv(int self, int epoch, Tensor(a!) x, Tensor(b!) scales, Tensor(c!) recv_count, Tensor(d!) info, "
      "bool owns_core, int slice_ns) -> int");
  m.def("ep_gather(int self, int epoch, Tensor(a!) x, Tensor(b!) scales) -> ()");
  m.def("ep_combine_send(int self, int epoch, Tensor y) -> ()");
  m.def("ep_combine_wait(int self, int epoch, bool owns_core, int slice_ns) -> int");
  m.def("ep_combine_recv(int self, int epoch, Tensor(a!) y, bool owns_core, int slice_ns) -> int");
  m.def("ep_sum_forwarded(int self, int epoch, int source, int message) -> int");
  m.def("ep_accept_returned(int self, int epoch, int node) -> bool");
  m.def("ep_sum_own(int self, int epoch, Tensor(a!) y) -> ()");
  m.def("ep_block_address(int self, int epoch, int source) -> int");
  m.def("ep_output_address(int self, int epoch) -> int");
  m.def("ep_stats(int self, Tensor(a!) out, bool reset) -> ()");
  m.def("ep_set_alive(int self, Tensor alive) -> ()");
  m.def("ep_set_counting(int self, bool on) -> ()");
  m.def("ep_count_alone(int self, int num_tokens, int compute_ns) -> ()");
  m.def("ep_delay_link(int self, int source, int delay_ns) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(eprt, CompositeExplicitAutograd, m) {
  m.impl("ep_flag_epoch", TORCH_BOX(&ep_flag_epoch));
  m.impl("ep_publish", TORCH_BOX(&ep_publish));
  m.impl("ep_checksum", TORCH_BOX(&ep_checksum));
  m.impl("ep_wait", TORCH_BOX(&ep_wait));
  m.impl("ep_gather_rows", TORCH_BOX(&ep_gather_rows));
  m.impl("ep_exchange_rows", TORCH_BOX(&ep_exchange_rows));
  m.impl("ep_segment_bytes", TORCH_BOX(&ep_segment_bytes));
  m.impl("ep_block_bytes", TORCH_BOX(&ep_block_bytes));
  m.impl("ep_returned_bytes", TORCH_BOX(&ep_returned_bytes));
  m.impl("ep_open", TORCH_BOX(&ep_open));
  m.impl("ep_close", TORCH_BOX(&ep_close));
  m.impl("ep_dispatch_send", TORCH_BOX(&ep_dispatch_send));
  m.impl("ep_outgoing_bytes", TORCH_BOX(&ep_outgoing_bytes));
  m.impl("ep_start_dispatch_wait", TORCH_BOX(&ep_start_dispatch_wait));
  m.impl("ep_forward", TORCH_BOX(&ep_forward));
  m.impl("ep_dispatch_recv", TORCH_BOX(&ep_dispatch_recv));
  m.impl("ep_gather", TORCH_BOX(&ep_gather));
  m.impl("ep_combine_send", TORCH_BOX(&ep_combine_send));
  m.impl("ep_combine_wait", TORCH_BOX(&ep_combine_wait));
  m.impl("ep_combine_recv", TORCH_BOX(&ep_combine_recv));
  m.impl("ep_sum_forwarded", TORCH_BOX(&ep_sum_forwarded));
  m.impl("ep_accept_returned", TORCH_BOX(&ep_accept_returned));
  m.impl("ep_sum_own", TORCH_BOX(&ep_sum_own));
  m.impl("ep_block_address", TORCH_BOX(&ep_block_address));
  m.impl("ep_output_address", TORCH_BOX(&ep_output_address));
  m.impl("ep_stats", TORCH_BOX(&ep_stats));
  m.impl("ep_set_alive", TORCH_BOX(&ep_set_alive));
  m.impl("ep_set_counting", TORCH_BOX(&ep_set_counting));
  m.impl("ep_count_alone", TORCH_BOX(&ep_count_alone));
  m.impl("ep_delay_link", TORCH_BOX(&ep_delay_link));
}

}  // namespace eprt::ep
