// Attention of few queries per request over a paged cache of latents, absorbed form, the latents in e4m3: both products
// with them are products of e4m3 on the tensor cores.
//
// A thread block has kRows rows (token, head) of one request and walks through its context in blocks of 64 positions,
// which lie in kStages stages. Four warpgroups share the work: two compute scores and weights of every other block
// (mla_dense_fp8_scores.cuh) and have it loaded (mla_dense_fp8_load.cuh), two add the values of all blocks to half of
// the output's columns each (mla_dense_fp8_values.cuh). Scores and weights of a block are a long chain of which two are
// on their way at any time, beside the products of values, so that the tensor cores have something to do.
//
// The thread blocks of a cluster have different rows of the same request: each loads half of the tiles, and the
// hardware hands them to both.
//
// Compile-time constants: CTAS (thread blocks of a cluster, 1 or 2), TERMS (of the queries' latents, 1 or 2).
#include "mla_dense_fp8_values.cuh"

namespace eprt {

// Registers of a warpgroup's threads. All warpgroups begin with 128.
EPRT_DEVICE void registers_for_scores() { asm volatile("setmaxnreg.dec.sync.aligned.u32 80;"); }
EPRT_DEVICE void registers_for_values() { asm volatile("setmaxnreg.inc.sync.aligned.u32 176;"); }

__global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(kThreads, 1)
    mla_dense_fp8(const __grid_constant__ MlaDecodeFp8Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem + (1024 - shared_address(smem) % 1024) % 1024);
  const int rank = kCtas > 1 ? cluster_rank() : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], kReaders * kCtas);
    for (int i = 0; i < kSlots; ++i) barrier_init(&s.weighed[i], kWarps), barrier_init(&s.taken[i], 2 * kWarps);
    for (int i = 0; i < 2; ++i) {
      barrier_init(&s.q_empty[i], kWarps);
      barrier_init(&s.summed[i], 2 * kWarps), barrier_init(&s.divided[i], 2 * kWarps);
    }
    for (int i = 0; i < 2 * kWarps; ++i) barrier_init(&s.raised[i / kWarps][i % kWarps], 1);
    barrier_init(&s.q_full, 1);
    publish_barriers();
  }
  __syncthreads();
  if (kCtas > 1) cluster_barrier();
  await_preceding_kernel();
  start_following_kernel();
  const int group = uniform(threadIdx.x / kWarpgroup);
  if (group < 2) {
    registers_for_scores();
    Scorer(p, s, group, rank).run();
  } else {
    registers_for_values();
    Adder(p, s, group, rank).run();
  }
  __syncwarp();
  if (kCtas > 1) cluster_barrier();  // the other block still arrives at this one's barriers
}

}  // namespace eprt
