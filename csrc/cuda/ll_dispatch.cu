// Low-latency dispatch. Send: each token once to each rank that holds one of its slots. Receive: expand it there.
#include "ll_dispatch_recv.cuh"
#include "ll_dispatch_send.cuh"

namespace eprt::low_latency {

__global__ void __launch_bounds__(kAllThreads, 1) dispatch(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ Begun begun;
  __shared__ WaitBook book;
  __shared__ Destinations destinations[kGroups];
  const Routing routing(p, smem);
  const Placement placement(routing.end(), p.context.num_slots);
  stamp(p.context, 0);
  open_book(&book, blockIdx.x == 0, false);
  if (threadIdx.x >= kFirstPlaceThread) {
    place(p, &book, &begun, placement);
  } else if (threadIdx.x >= kThreads) {
    if (p.phases & kSend) raise_flags(p, begun, destinations, (threadIdx.x - kThreads) / kWarp, threadIdx.x % kWarp);
  } else {
    if (p.phases & kSend)
      send(p, routing, begun, destinations);
    else
      sync_workers_and_placers(kBegun);
    if (p.phases & kRecv) receive(p, &book, placement, begun.epoch);
  }
}

}  // namespace eprt::low_latency
