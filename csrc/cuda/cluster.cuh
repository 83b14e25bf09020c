// Thread blocks of a cluster: which one this is, and their barriers.
#pragma once
#include "bulk.cuh"

namespace eprt {

EPRT_DEVICE int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

EPRT_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

// Arrives at the same barrier of block `rank` of the cluster.
EPRT_DEVICE void barrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{ .reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [at]; }" ::"r"(
          shared_address(barrier)),
      "r"(rank)
      : "memory");
}

}  // namespace eprt
