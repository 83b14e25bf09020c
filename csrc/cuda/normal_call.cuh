// How a launch of normal_dispatch.cu or normal_combine.cu runs: its epoch, which warps send and receive, the flag warp.
#pragma once
#include "bulk.cuh"
#include "normal.cuh"

namespace eprt::normal {

constexpr int kWarps = 15;                      // warps that move data, at most
constexpr int kThreads = (kWarps + 1) * kWarp;  // and the flag warp

// How a launch divides its thread blocks and warps between sending and receiving; eprt/ep/nvlink/normal_grid.py
// chooses.
struct Division {
  // In a launch of both phases: the first so many blocks only send, the others only receive; 0: every block does both.
  int32_t send_blocks;
  int32_t send_warps;  // the first so many warps of a sending block send
  int32_t recv_warps;  // the first so many warps of a receiving block receive, except those that send
};

// By how many rows of a warp flags lag behind. By expert a warp does more for a row than the link, so the row before
// has been acknowledged when the next is issued.
using Flags = LateFlags<kGrouped ? 1 : 2>;

struct Call {  // in shared memory
  WaitBook book;
  FlagDesk desk[kWarps];
  uint32_t epoch;
};

struct Share {
  bool takes_part;
  int index, count;  // of this warp among the warps that take part; how many there are
};

// Neighbouring indices belong to different blocks, so that little work still uses all blocks.
EPRT_DEVICE Share share_of(const Division& division, int32_t phases, int32_t phase) {
  const int warp = threadIdx.x / kWarp;
  const bool both = phases == (kSend | kRecv), apart = both && division.send_blocks > 0;
  const int first_block = apart && phase == kRecv ? division.send_blocks : 0;
  const int end_block = apart && phase == kSend ? division.send_blocks : gridDim.x;
  const int first_warp = both && !apart && phase == kRecv ? division.send_warps : 0;
  const int end_warp = phase == kSend ? division.send_warps : division.recv_warps;
  const int block = int(blockIdx.x) - first_block, blocks = end_block - first_block;
  return {bool(phases & phase) && block >= 0 && block < blocks && warp >= first_warp && warp < end_warp,
          (warp - first_warp) * blocks + block, (end_warp - first_warp) * blocks};
}

// Units of work of a warp: the first few are static, the rest are claimed dynamically, so that SMs with less bandwidth
// to the link do less. A warp that does not take part by its share, one that has sent everything, claims all of its
// units. A unit is claimed long before it is needed. (Where a row goes does not depend on who moves it.)
struct Turns {
  static constexpr int kKnown = 3;

  int number[kKnown];  // the current unit and the next two
  uint32_t* taken;     // counts the units claimed in this launch
  int num_static;      // units that no warp claims
  int asked;           // lane 0: the last unit that was claimed

  EPRT_DEVICE Turns(const Context& c, CallKind kind, Phases phase, uint32_t epoch, const Share& share, int lane)
      : taken(taken_at(c, kind, phase, epoch)), num_static((kKnown + 1) * share.count) {
    int first = share.index, step = share.count;
    if (!share.takes_part) {
      first = lane == 0 ? num_static + int(atomicAdd(taken, uint32_t(kKnown + 1))) : 0;
      first = __shfl_sync(kAllLanes, first, 0), step = 1;
    }
#pragma unroll
    for (int i = 0; i < kKnown; ++i) number[i] = first + i * step;
    asked = first + kKnown * step;
  }

  // number[i], i >= 1. Without a variable index, so that the array stays in registers.
  EPRT_DEVICE int after(int i) const { return i == 1 ? number[1] : number[2]; }

  EPRT_DEVICE void step(int lane) {
#pragma unroll
    for (int i = 0; i + 1 < kKnown; ++i) number[i] = number[i + 1];
    number[kKnown - 1] = __shfl_sync(kAllLanes, asked, 0);
    if (lane == 0) asked = num_static + int(atomicAdd(taken, 1u));
  }
};

// Whether this thread block keeps the wait book: the first block that receives.
EPRT_DEVICE bool keeps_book(const Division& division, int32_t phases) {
  return int(blockIdx.x) == (phases == (kSend | kRecv) ? division.send_blocks : 0);
}

// The whole of a launch. tell_places(): tells all ranks where what they send goes; called before all else, because they
// wait for it. move(warp): what the warps that move data do.
template <class Params, class Tell, class Move>
EPRT_DEVICE void run_call(const Params& p, CallKind kind, Call* call, Tell tell_places, Move move) {
  const Context& c = p.context;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool sends = p.phases & kSend;
  if (threadIdx.x == 0) {
    call->epoch = sends ? take_ticket(c, kind) : p.layout.epoch[kind];
    if (sends && blockIdx.x == 0) {
      p.layout.epoch[kind] = call->epoch;
      // Reset the counters of the next epoch. Their last users, 2B launches before, are complete: at most B handles are
      // in flight. To reset this launch's own, all warps' additions would have to be ordered before the last block.
      *taken_at(c, kind, kSend, call->epoch + 1) = 0;
      *taken_at(c, kind, kRecv, call->epoch + 1) = 0;
    }
  }
  open_book(&call->book, keeps_book(p.division, p.phases));
  if (warp < kWarps && lane == 0) open_desk(call->desk + warp, share_of(p.division, p.phases, kSend).takes_part);
  __syncthreads();
  if (sends && blockIdx.x == 0) tell_places();
  if (warp == kWarps)
    raise_flags<kWarps>(call->desk, call->epoch, lane);
  else
    move(warp);
  __syncthreads();
  close_book(c, &call->book, kind);
}

}  // namespace eprt::normal
