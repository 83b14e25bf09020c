// Exchange: one rank's side of dispatch and combine over the node's shared window. docs/protocol.md explains every
// flag; eprt/ep/cpu/backend.py checks the arguments, orders the calls and moves the messages between nodes.
//
// No call blocks except the two waits, which return after one slice of time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/ep_layout.h"
#include "cpu/ep_rows.h"

namespace eprt::ep {

// Which rank is on which node. A local index counts the ranks of a node in rank order.
struct Topology {
  int rank, node, local_index;
  std::vector<int> node_of_rank, local_index_of_rank, ranks_per_node;
  // Where this node keeps the block of each source rank: the segment (local index of its owner), the block within it.
  std::vector<int> home_segment, home_block;
};

// Memory, allocated by the caller.
struct Memory {
  std::vector<char*> segments;               // [ranks of this node]
  std::vector<int> num_blocks;               // [ranks of this node]
  std::vector<std::vector<char*>> outgoing;  // [set][node]: block to be sent there, null for this rank's own node
  std::vector<std::vector<char*>> returned;  // [set][node]: its Returned message
};

struct Tokens {
  const char* x;         // [num_tokens, hidden]
  const void* slot_idx;  // [num_tokens, top_k]: int32 or int64
  const float* weights;  // [num_tokens, top_k]
  bool slot_idx_is_64bit;
  int num_tokens;
};

// Totals since the last reset. Times in nanoseconds.
struct Stats {
  std::vector<int64_t> dispatch_wait_ns, combine_wait_ns, recv_tokens, sent_tokens;  // [num_ranks]
  // blocked_ns: the sum over calls of the wait for the last rank.
  int64_t num_calls = 0, compute_ns = 0, blocked_ns = 0;
};

class Exchange {
 public:
  Exchange(const Shape& shape, const Topology& topology, const Memory& memory);

  // Writes the blocks for all nodes and publishes the one for this node. Returns -1, or the flat index of the first
  // slot_idx that is out of range or of a rank that takes no part; nothing is published then.
  int64_t dispatch_send(uint64_t epoch, const Tokens& tokens, int num_rounds);
  // Size of the block for another node, to be sent from Memory::outgoing.
  size_t outgoing_bytes(uint64_t epoch, int node) const;
  // Publishes a block from another node, which lies complete in this rank's segment. False if it is of another epoch.
  bool forward(uint64_t epoch, int source);
  // From now on time counts as waiting for the ranks whose blocks are missing. Only an epoch's first call has effect.
  void start_dispatch_wait(uint64_t epoch);
  // Fault injection: from now on what a source publishes counts as arrived only after this delay.
  void delay_link(int source, int64_t delay_ns) { link_delay_ns_[source] = delay_ns; }
  // From now on the ranks where alive is 0 take no part: nobody waits for them, and their slots are out of range. Of
  // one node only, and while no dispatch is under way. Default: all take part.
  void set_alive(const std::vector<int>& alive) { alive_ = alive; }
  // Whether waits, tokens and compute time are counted; default: on. Off only to measure the cost of counting.
  void set_counting(bool on) { counting_ = on; }
  // A dispatch of a rank alone, which computed without any call.
  void count_alone(int64_t num_tokens, int64_t compute_ns);
  // One slice of waiting for all blocks. Returns -1 when all have arrived, else the source rank of the first missing
  // one.
  int64_t wait_dispatch(uint64_t epoch, bool owns_core, int64_t slice_ns);
  // Counts the rows for each slot of this rank; returns their sum. num_rounds: the largest that a source announced.
  int64_t count_rows(uint64_t epoch, int32_t* recv_count, int32_t* num_rounds);
  // Copies the rows, ordered by (slot, source rank, token). scales is used only for an fp8 payload.
  void gather(uint64_t epoch, char* x, float* scales);

  // Publishes the experts' outputs, in the order of the rows; copies them unless they lie in output_rows(epoch).
  void combine_send(uint64_t epoch, const char* y);
  char* output_rows(uint64_t epoch) const { return outputs(topology_.local_index, set_of(epoch)).rows; }
  // One slice of waiting for all outputs of the node. Returns -1, or the local index of the first missing rank.
  int64_t wait_combine(uint64_t epoch, bool owns_core, int64_t slice_ns);
  // Sums this node's share of a forwarded block into a Returned message; returns its bytes.
  size_t sum_forwarded(uint64_t epoch, int source, char* message);
  // Accepts the message of a node, which lies complete in Memory::returned. False if it is of another epoch.
  bool accept_returned(uint64_t epoch, int node);
  // Sums this rank's tokens into y [num_tokens, hidden] of dtype: this node's share, then the returned ones in node
  // order.
  void sum_own(uint64_t epoch, char* y);

  char* block_at(uint64_t epoch, int source) const;
  const Shape& shape() const { return shape_; }
  Stats& stats() { return stats_; }
  void reset_stats();

 private:
  // What this rank remembers from one phase to the next.
  struct Flight {
    int num_tokens = 0, num_received = 0;
    std::vector<int> num_rows;          // [node]: rows of the block for that node
    std::vector<int32_t> row_of_token;  // [node, num_max_tokens]: the token's row in that block, or -1
    int64_t dispatch_wait_start_ns = 0, combine_wait_start_ns = 0, node_complete_ns = 0, compute_start_ns = 0;
    int64_t blocked_between_nodes_ns = 0;  // of this combine, already counted
  };

  int set_of(uint64_t epoch) const { return static_cast<int>(epoch % shape_.num_sets); }
  Flight& flight(uint64_t epoch) { return flights_[set_of(epoch)]; }
  int num_nodes() const { return static_cast<int>(topology_.ranks_per_node.size()); }
  int num_node_slots(int node) const { return topology_.ranks_per_node[node] * shape_.slots_per_rank; }
  const Segment& segment(int local_index) const { return segments_[local_index]; }
  Outputs outputs(int local_index, int set) const { return Outputs(segment(local_index).outputs(set), shape_); }
  Block source_block(uint64_t epoch, int source) const;
  Block written_block(uint64_t epoch, int node) const;
  Flag* source_flag(int source) const;

  int64_t count_slots(Flight& flight, const Tokens& tokens);
  void write_entries(const Flight& flight, const Tokens& tokens, std::vector<Block>& blocks);
  void write_rows(const Flight& flight, const Tokens& tokens, int node, Block& block);
  void record_dispatch(uint64_t epoch);
  int64_t count_ns() const { return counting_ ? now_ns() : 0; }
  // When a source's data of either phase have arrived: after they were published and the injected delay of its link.
  int64_t dispatch_ns(uint64_t epoch, int source) const;
  int64_t combine_ns(uint64_t epoch, int rank) const;
  // Pointers to the output row of each (row, k) of a block in this node, null for slots of other nodes.
  void locate_outputs(uint64_t epoch, int source, const Block& block);
  int terms_of_row(const Block& block, int row, Term* terms) const;

  Shape shape_;
  Topology topology_;
  Memory memory_;
  std::vector<Segment> segments_;
  std::vector<Flight> flights_;
  Stats stats_;
  bool counting_ = true;
  std::vector<int64_t> link_delay_ns_;  // [num_ranks]
  std::vector<int> alive_;              // [num_ranks]: whether each rank takes part

  // Slots ordered by node: the position of each slot, and where each node begins.
  std::vector<int> flat_slot_, node_slot_begin_;
  // Scratch memory, sized once.
  std::vector<int32_t> slot_count_, slot_cursor_, rank_tokens_, last_token_of_rank_;
  std::vector<const char*> output_of_entry_;
  struct RowSource {
    const char* row;
    const float* scale;
  };
  std::vector<RowSource> row_sources_;
};

}  // namespace eprt::ep
