// Ranks of a team wait for each other on their GPUs: what each of them launched before, on the same stream, is there
// for what all of them launch behind.
//
// The kernels before have ended when this one runs, so the release covers what they wrote, also into other GPUs'
// memory; the kernels behind begin when it has ended, after the acquire.
//
// Compile-time constants: NUM_RANKS (<= 32).
#include "common.cuh"

namespace eprt {

constexpr int kRanks = NUM_RANKS;
static_assert(kRanks <= kWarp, "a lane stands for a rank");

struct MeetParams {
  uint64_t peer[kRanks];  // address of each rank's flags, as mapped here: [2][R], by the epoch's parity and who raises
  Deadline deadline;
  uint32_t team;   // a bit for each rank that meets
  uint32_t epoch;  // of this meeting, never 0; its parity is other than that of the one before
  int32_t rank;    // this one
};

// One warp. A rank that is masked is neither told nor waited for.
__global__ void __launch_bounds__(kWarp) meet(const __grid_constant__ MeetParams p) {
  const int lane = threadIdx.x;
  if (lane >= kRanks || lane == p.rank || !(p.team >> lane & 1) || load_relaxed(p.deadline.mask + lane)) return;
  const int set = int(p.epoch & 1) * kRanks;
  store_release_sys(reinterpret_cast<uint32_t*>(p.peer[lane]) + set + p.rank, p.epoch);
  const uint32_t* const raised = reinterpret_cast<const uint32_t*>(p.peer[p.rank]) + set + lane;
  wait_longer<false>(raised, p.epoch, p.deadline, kMeeting, lane);
}

}  // namespace eprt
