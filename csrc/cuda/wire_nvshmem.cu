// The wire by NVSHMEM: the functions of wire.cuh, in terms of NVSHMEM's public device calls. The only file that needs
// NVSHMEM's headers; eprt/gpu/nvshmem_link.py compiles it once and links it to the kernels.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cuda/std/cassert>
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/cstdlib>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>

// NVRTC has no <type_traits>, which NVSHMEM 3.4 takes these from; and its 64-bit integers are `long long`, while the
// library was built with the host's, which are `long`: other names for the linker.
namespace std {
using cuda::std::is_integral;
using cuda::std::is_signed;
using cuda::std::is_unsigned;
}  // namespace std
#define int64_t long
#define uint64_t unsigned long

#include <nvshmem.h>
#include <nvshmemx.h>

extern "C" __device__ void eprt_wire_put(void* to, const void* from, unsigned long long bytes, void* word,
                                         unsigned long long value, int peer) {
  __threadfence_system();  // a card reads `from` from outside
  nvshmemx_putmem_signal_nbi_warp(to, from, bytes, static_cast<uint64_t*>(word), value, NVSHMEM_SIGNAL_SET, peer);
}

extern "C" __device__ void eprt_wire_post(void* word, unsigned long long value, int peer) {
  nvshmemx_signal_op(static_cast<uint64_t*>(word), value, NVSHMEM_SIGNAL_SET, peer);
}

// The value is there, so this does not wait; it does what the transport needs before the bytes may be read.
extern "C" __device__ void eprt_wire_see(void* word, unsigned long long value) {
  nvshmem_uint64_test(static_cast<uint64_t*>(word), NVSHMEM_CMP_EQ, value);
}
