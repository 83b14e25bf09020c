// Parameters of the low-latency dispatch, shared by its sending and its receiving side.
#pragma once
#include "low_latency_wire.cuh"

namespace eprt::low_latency {

constexpr int kGroups = 2;  // of workers, each of which numbers the entries of one token together
constexpr int kGroupThreads = kThreads / kGroups;
constexpr int kGroupWarps = kGroupThreads / kWarp;
constexpr int kPlaceThreads = 128;  // threads that count and place rows while the others send
constexpr int kAllThreads = kThreads + kPlaceThreads;

struct DispatchParams {
  Context context;
  Handle handle;
  const uint8_t* x;          // bf16 [T, H]
  const void* topk_slot;     // [T, K]: global slot or -1
  const float* topk_weight;  // [T, K], or null if the owner applies the weights in combine (EXACT)
  uint8_t* recv_x;           // fp8 or bf16 [rows, H]
  void* recv_scale;     // (slot, row, g) at slot * scale_slot_stride + row * scale_row_stride + g * scale_group_stride
  int32_t* recv_count;  // [L]: rows of each local slot
  int32_t* recv_token;  // [rows]: index of each row's token on its source, or null
  int64_t* recv_range;  // [L][R]: first row within the slot << 32 | rows, for each source, or null
  int32_t* recv_total;  // [L]: the caller's own sum of recv_count, or null
  int64_t* wait_cost;   // [R]: the caller's own totals of waiting, ns, or null
  int64_t scale_slot_stride;
  int64_t scale_row_stride;
  int64_t scale_group_stride;
  int32_t num_tokens;   // T
  int32_t slot_bytes;   // of one topk_slot: 4 or 8
  int32_t slot_stride;  // rows between the first rows of two slots; 0: compact, each aligned to `alignment`
  int32_t alignment;
  int32_t scale_format;  // ScaleFormat
  int32_t phases;        // Phases
};

enum ScaleFormat : int32_t {
  kFloat = 0,       // fp32
  kPowerOfTwo = 1,  // fp32, rounded up to a power of two
  kExponents = 2    // powers of two as exponents, four in an int32: element (row, g) holds groups 4 g to 4 g + 3
};

enum Barrier : int {
  kBegun = 1,  // joins all threads: the epoch, the mask and the routing are in shared memory
  kCounted,    // the placing threads tell the workers that the counts have left
  kWorkers,    // joins the workers
  kPlacers,    // joins the placing threads
  kPlaced,     // the placing threads tell the workers that the place of every row is known
  kGroup       // per group: joins its threads
};

struct Begun {  // in shared memory, from the barrier kBegun on
  uint32_t epoch;
  uint32_t masked;  // a bit per rank
};

EPRT_DEVICE void sync_workers() { barrier_sync(kWorkers, kThreads); }
EPRT_DEVICE void sync_placers() { barrier_sync(kPlacers, kPlaceThreads); }
EPRT_DEVICE void sync_begun() { barrier_sync(kBegun, kAllThreads); }

// The vector of a chunk that a lane has when a warp holds the chunk in lines, if the lane does not end its line.
EPRT_DEVICE int vector_of_lane(int quad, int lane) {
  return (quad * kWarpLines + lane / kLineLanes) * kLineVectors + lane % kLineLanes;
}

}  // namespace eprt::low_latency
