// Low-latency dispatch. Send: each token goes once to each rank that holds one of its slots. Receive: the token is
// copied to the rows of its slots there.
#include "low_latency_dispatch_recv.cuh"
#include "low_latency_dispatch_send.cuh"

namespace eprt::low_latency {

// What the placing threads do: while the others send, they send the counts and compute the place of every row before it
// arrives.
EPRT_DEVICE void place(const DispatchParams& p, const Routing& routing, WaitBook* book, Begun* begun,
                       const Placement& placement) {
  const Context& c = p.context;
  const int thread = threadIdx.x - kThreads, lane = thread % kWarp;
  if (thread == 0) begun->epoch = p.phases & kSend ? next_epoch(c, p.handle, 0) : p.handle.epoch[0];
  if (thread / kWarp == 1) {
    const uint32_t masked = masked_ranks(c.deadline, lane);
    if (lane == 0) begun->masked = masked;
  }
  EPRT_WIRED(if (kLayered && p.phases & kSend) {
    sync_placers();
    if (thread == 0) begun->masked = agree_on_mask(c, begun->epoch, begun->masked);
  })
  sync_begun();
  if (p.phases & kSend) {
    send_counts(p, routing, *begun, thread);
    barrier_arrive(kCounted, kAllThreads);
  }
  stamp(c, 2, kThreads);
  if (!(p.phases & kRecv)) return;
  place_rows(p, book, *begun, placement, thread);
  // For publish_counts; and for racecheck, which derives order only from barriers at which threads wait, not from
  // arrivals.
  sync_placers();
  barrier_arrive(kPlaced, kAllThreads);
  if (blockIdx.x == 0) publish_counts(p, placement, thread);
}

__global__ void __launch_bounds__(kAllThreads, 1) dispatch(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ Begun begun;
  __shared__ WaitBook book;
  __shared__ Vec16 magnitudes[kWarps][kChunkVectors / 4];
  __shared__ int index[kGroups][2][kTopk];
  __shared__ int32_t taken;  // units claimed, see receive
  const Routing routing(p, smem);
  const Placement placement(p.context, routing.end());
  stamp(p.context, 0);
  open_book(&book, blockIdx.x == 0, false);
  if (threadIdx.x == 0) taken = 0;
  if (threadIdx.x >= kThreads) return place(p, routing, &book, &begun, placement);
  if (p.phases & kSend)
    send(p, routing, begun, index, magnitudes);
  else
    sync_begun();
  if (p.phases & kRecv) receive(p, &book, placement, begun.epoch, &taken);
}

}  // namespace eprt::low_latency
