// Looks for torn lines: what lines.cuh takes for granted of a machine. tests/gpu/test_lines.py runs it.
#include "lines.cuh"

namespace eprt::line_probe {

struct ProbeParams {
  uint8_t* to;          // a peer's memory: kWarpLineBytes for each pair of warps
  const uint8_t* mine;  // the same of this rank, which the peer fills
  uint64_t* found;      // [2]: lanes that saw another number than the end of their line; numbers that lanes saw
  int32_t rounds;
  int32_t unused;
};

// Half of the warps fill four lines with 1, 2, ..., `rounds`, one number after another; the other half look at what the
// peer has filled, until it is the last number.
__global__ void __launch_bounds__(512, 1) probe(const __grid_constant__ ProbeParams p) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, pairs = blockDim.x / kWarp / 2;
  const int at = (int(blockIdx.x) * pairs + warp % pairs) * kWarpLineBytes + lane * 16;
  if (warp < pairs) {
    for (uint32_t i = 1; i <= uint32_t(p.rounds); ++i) store_line(p.to + at, {{i, i, i, i}});
    return;
  }
  uint64_t torn = 0, numbers = 0;
  uint32_t last = 0;
  while (__any_sync(kAllLanes, last != uint32_t(p.rounds))) {
    Vec16 v{};
    load_line(v, p.mine + at, 0);
    const uint32_t end = __shfl_sync(kAllLanes, v.w[3], lane | kLineVectors);
    torn += v.w[0] != end || v.w[1] != end || v.w[2] != end || v.w[3] != end;
    numbers += end != last;
    last = end;
  }
  atomicAdd(p.found, torn);
  atomicAdd(p.found + 1, numbers);
}

}  // namespace eprt::line_probe
