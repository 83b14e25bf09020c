// How a launch of normal_dispatch.cu or normal_combine.cu runs: its epoch, who sends and who receives, a warp for the
// flags.
#pragma once
#include "flags.cuh"
#include "normal.cuh"

namespace eprt::normal {

constexpr int kWarps = 15;                      // that move data, at most;
constexpr int kThreads = (kWarps + 1) * kWarp;  // one more raises flags

// How a launch shares its thread blocks and warps between sending and receiving; eprt/ep/nvlink/normal_grid.py chooses.
struct Division {
  // In a launch of both the first ones only send, the others only receive; 0: every block does both.
  int32_t send_blocks;
  int32_t send_warps;  // of a block that sends, its first ones
  int32_t recv_warps;  // of a block that receives; where it sends as well, the send_warps less
};

struct Call {  // in shared memory
  WaitBook book;
  FlagDesk desk[kWarps];
  uint32_t epoch;
};

struct Share {
  bool takes_part;
  int index, count;  // of this warp among those
};

// Neighbouring numbers lie in different blocks, so that few pieces of work still use all of them.
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

// Numbers of a warp's work, of a launch's: the first ones fixed, then whichever comes next, so that multiprocessors to
// which the link gives less do less. A number is asked for long before it is needed. (Where rows go does not depend on
// who sends them.)
struct Turns {
  static constexpr int kKnown = 3;

  int number[kKnown];  // this one, and the next two
  uint32_t* taken;
  int share_count, asked;

  EPRT_DEVICE Turns(const Context& c, Verb verb, uint32_t epoch, const Share& share)
      : taken(taken_at(c, verb, epoch)), share_count(share.count), asked(share.index + kKnown * share.count) {
#pragma unroll
    for (int i = 0; i < kKnown; ++i) number[i] = share.index + i * share.count;
  }

  // i from 1. Named one by one, so that they stay in registers.
  EPRT_DEVICE int after(int i) const { return i == 1 ? number[1] : number[2]; }

  EPRT_DEVICE void step(int lane) {
#pragma unroll
    for (int i = 0; i + 1 < kKnown; ++i) number[i] = number[i + 1];
    number[kKnown - 1] = __shfl_sync(kAllLanes, asked, 0);
    if (lane == 0) asked = (kKnown + 1) * share_count + int(atomicAdd(taken, 1u));
  }
};

// One thread block keeps the wait book: the first that receives, where that is a phase of its own.
EPRT_DEVICE bool keeps_book(const Division& division, int32_t phases) {
  return int(blockIdx.x) == (phases == (kSend | kRecv) ? division.send_blocks : 0);
}

// The whole of a launch. tell_places(): tells everyone where what they send belongs; before all else, as others wait
// for it. move(warp): what the warps that move data do.
template <class Params, class Tell, class Move>
EPRT_DEVICE void run_call(const Params& p, Verb verb, Call* call, Tell tell_places, Move move) {
  const Context& c = p.context;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool sends = p.phases & kSend;
  if (threadIdx.x == 0) {
    call->epoch = sends ? take_ticket(c, verb) : p.layout.epoch[verb];
    if (sends && blockIdx.x == 0) {
      p.layout.epoch[verb] = call->epoch;
      // The next launch's. Its last user was the launch before this one, hence is complete; to set this launch's own
      // back would take an order between all warps' additions and the last block.
      *taken_at(c, verb, call->epoch + 1) = 0;
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
  close_book(c, &call->book, verb);
}

}  // namespace eprt::normal
