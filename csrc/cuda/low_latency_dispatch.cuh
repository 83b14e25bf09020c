// Parameters of the low-latency dispatch, shared by its sending and its receiving side.
#pragma once
#include "low_latency.cuh"

namespace eprt::low_latency {

constexpr int kGroups = 2;  // of threads that send a token together; if the launch does both, one group only receives
constexpr int kGroupThreads = kThreads / kGroups;
constexpr int kGroupWarps = kGroupThreads / kWarp;
constexpr int kPlaceThreads = 128;                             // threads that place rows while the others still send
constexpr int kFirstPlaceThread = kThreads + kGroups * kWarp;  // after a flag warp per group
constexpr int kAllThreads = kFirstPlaceThread + kPlaceThreads;
constexpr int kUnits = kHidden / 16;  // a unit: 16 values, one 16-byte fp8 store
constexpr int kThreadUnits = ceil_div(kUnits, kGroupThreads);
constexpr int kMessageParts = ceil_div(kPayloadVectors, 2 * kPartVectors);  // a warp expands one part
constexpr int kMessageLane = 2 * kPartLane;
// Vectors of a part: whole scale groups, in fours where exponents are packed. A lane has at most one scale.
constexpr int kMessageLength = ceil_div(ceil_div(kPayloadVectors, kMessageParts), kWarp) * kWarp;
static_assert(kMessageLength <= kMessageLane * kWarp, "a part is more than a warp takes");

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

// A release waits some microseconds until the group's stores have reached the peers. So each group has a flag warp that
// does it while the group goes on: kStored tells the flag warp that a token is stored, and kRead tells the group that
// the flag warp has read where the token went.
enum Barrier : int {
  kWorkers = 1,                // joins the workers
  kBegun,                      // the placing threads have published the epoch and the mask
  kPlacers,                    // joins the placing threads
  kPlaced,                     // per group: the place of every row is known
  kGroup = kPlaced + kGroups,  // per group: joins its threads
  kStored = kGroup + kGroups,  // per group: a token is stored
  kRead = kStored + kGroups    // per group: the flag warp has read where the token went
};

struct Begun {  // in shared memory, from the barrier kBegun on
  uint32_t epoch;
  uint32_t masked;  // a bit per rank
};

EPRT_DEVICE void sync_workers() { barrier_sync(kWorkers, kThreads); }
EPRT_DEVICE void sync_placers() { barrier_sync(kPlacers, kPlaceThreads); }
EPRT_DEVICE void sync_begun() { barrier_sync(kBegun, kThreads + kPlaceThreads); }

// Groups that send: one if the launch also receives, so that the other one expands tokens while the link is busy.
EPRT_DEVICE int num_senders(const DispatchParams& p) { return p.phases & kRecv ? 1 : kGroups; }

}  // namespace eprt::low_latency
