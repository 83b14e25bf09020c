// Low-latency dispatch. Send: each token once to each rank that holds one of its slots. Receive: expand it there.
#include "ll_dispatch_recv.cuh"
#include "ll_dispatch_send.cuh"

namespace eprt::low_latency {

__global__ void __launch_bounds__(kAllThreads, 1) dispatch(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ uint32_t epoch_shared, masked_shared;
  __shared__ Destinations destinations[kGroups];
  const Context& c = p.context;
  const int lane = threadIdx.x % kWarp;
  const bool sends = p.phases & kSend;
  stamp(c, 0);
  if (threadIdx.x >= kThreads) {
    if (sends) raise_flags(p, epoch_shared, destinations, (threadIdx.x - kThreads) / kWarp, lane);
    return;
  }
  // Three loads from far away at once: epoch, mask and (in load_routing) the routing.
  if (threadIdx.x == kThreads - 1) epoch_shared = sends ? next_epoch(c, p.handle, 0) : p.handle.epoch[0];
  if (threadIdx.x / kWarp == kWarps - 2) {
    const uint32_t masked = __ballot_sync(kAllLanes, lane < kRanks && load_relaxed(c.deadline.mask + lane));
    if (lane == 0) masked_shared = masked;
  }
  if (sends) {
    const Routing routing = load_routing(p, smem);
    stamp(c, 1);
    uint8_t* scratch = reinterpret_cast<uint8_t*>(routing.to_rank + kRanks * routing.words);
    send(p, routing, epoch_shared, masked_shared, destinations, scratch);
  }
  sync_workers();  // the receiving side uses the same shared memory
  if (p.phases & kRecv) receive(p, epoch_shared, smem);
}

}  // namespace eprt::low_latency
