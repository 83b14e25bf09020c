// The layout of everything that ranks share: these constructors both size and place it. docs/protocol.md explains the
// fields.
//
//   segment (one per rank, in the node's shared window)
//     Flag combine | Flag block[num_blocks]
//     per buffer set:  block[num_blocks] | outputs
//   block 0 is the rank's own dispatch to its node; the others are dispatches of ranks of other nodes that it forwards.
//   A block is, byte for byte, also the message between nodes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/ep_flag.h"

namespace eprt::ep {

inline constexpr int kScaleGroup = 128;  // values of an fp8 row that share one scale

enum class Dtype : int { kFloat32 = 0, kBFloat16 = 1 };
inline size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

inline size_t align_up(size_t bytes, size_t to = 64) { return (bytes + to - 1) / to * to; }

// Equal on all ranks.
struct Shape {
  int num_ranks, slots_per_rank, hidden, top_k, num_max_tokens, num_sets;
  Dtype dtype;  // of tokens and results
  bool fp8;     // payload of dispatch: e4m3 with scales, otherwise dtype

  size_t row_bytes() const { return hidden * dtype_bytes(dtype); }
  size_t payload_bytes() const { return fp8 ? hidden : row_bytes(); }
  int num_scales() const { return fp8 ? (hidden + kScaleGroup - 1) / kScaleGroup : 0; }
  int num_slots() const { return num_ranks * slots_per_rank; }
  // All tokens of all ranks may choose slots of one rank. Pages that are never touched take no memory.
  int64_t max_rows() const { return int64_t{num_ranks} * num_max_tokens * top_k; }
};

// Hands out aligned pieces of memory one after another. With a null base it only measures their size.
class Cursor {
 public:
  explicit Cursor(char* base) : base_(base) {}
  template <class T>
  T* take(size_t count) {
    char* piece = base_ + bytes_;
    bytes_ += align_up(count * sizeof(T));
    return reinterpret_cast<T*>(piece);
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

struct alignas(64) BlockHeader {
  uint64_t epoch;
  int64_t publish_ns;  // time at which the block became visible in this node
  int32_t num_rows, num_rounds;
};

// What a source rank dispatches to a node: each token that has a slot there, once.
struct Block {
  BlockHeader* header;
  int32_t* rank_tokens;  // [ranks of the node]: tokens that go to each of them
  int32_t* slot_begin;   // [slots of the node + 1]: where each slot's entries begin
  int32_t* entry;        // [<= num_rows * top_k]: row * top_k + k, ordered by slot, then token, then k
  float* weight;         // [num_rows, top_k]
  float* scale;          // [num_rows, num_scales]
  char* rows;            // [num_rows, hidden]
  size_t bytes;

  Block(char* base, const Shape& shape, int num_node_ranks, int num_rows) {
    Cursor cursor(base);
    header = cursor.take<BlockHeader>(1);
    rank_tokens = cursor.take<int32_t>(num_node_ranks);
    slot_begin = cursor.take<int32_t>(num_node_ranks * shape.slots_per_rank + 1);
    entry = cursor.take<int32_t>(size_t(num_rows) * shape.top_k);
    weight = cursor.take<float>(size_t(num_rows) * shape.top_k);
    scale = cursor.take<float>(size_t(num_rows) * shape.num_scales());
    rows = cursor.take<char>(num_rows * shape.payload_bytes());
    bytes = cursor.bytes();
  }
  static size_t max_bytes(const Shape& shape, int num_node_ranks) {
    return Block(nullptr, shape, num_node_ranks, shape.num_max_tokens).bytes;
  }
};

// The outputs of a rank's experts.
struct Outputs {
  int64_t* publish_ns;  // [1]
  int32_t* row_begin;   // [num_ranks, slots_per_rank]: first row of each (source rank, slot)
  char* rows;           // [max_rows, hidden] of dtype, in the order of the received rows
  size_t bytes;

  Outputs(char* base, const Shape& shape) {
    Cursor cursor(base);
    publish_ns = cursor.take<int64_t>(1);
    row_begin = cursor.take<int32_t>(size_t(shape.num_ranks) * shape.slots_per_rank);
    rows = cursor.take<char>(shape.max_rows() * shape.row_bytes());
    bytes = cursor.bytes();
  }
};

// The message in which a node returns to a source rank of another node its share of the sum of each row of the block.
struct Returned {
  uint64_t* epoch;  // [1]
  int64_t* age_ns;  // [ranks of the summing node]: age of each one's outputs when the message was made
  char* rows;       // [num_rows, hidden] of dtype
  size_t bytes;

  Returned(char* base, const Shape& shape, int num_node_ranks, int num_rows) {
    Cursor cursor(base);
    epoch = cursor.take<uint64_t>(1);
    age_ns = cursor.take<int64_t>(num_node_ranks);
    rows = cursor.take<char>(num_rows * shape.row_bytes());
    bytes = cursor.bytes();
  }
};

struct Segment {
  Flag* combine;
  Flag* block_flag;  // [num_blocks]
  char* sets;
  size_t block_bytes, set_bytes, bytes;
  int num_blocks;

  Segment(char* base, const Shape& shape, int num_node_ranks, int num_blocks) : num_blocks(num_blocks) {
    Cursor cursor(base);
    combine = cursor.take<Flag>(1);
    block_flag = cursor.take<Flag>(num_blocks);
    block_bytes = Block::max_bytes(shape, num_node_ranks);
    set_bytes = num_blocks * block_bytes + Outputs(nullptr, shape).bytes;
    sets = cursor.take<char>(shape.num_sets * set_bytes);
    bytes = cursor.bytes();
  }
  char* block(int set, int index) const { return sets + set * set_bytes + index * block_bytes; }
  char* outputs(int set) const { return block(set, num_blocks); }
};

}  // namespace eprt::ep
