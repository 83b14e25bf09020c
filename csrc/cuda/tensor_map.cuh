// Matrices in global memory as bulk copies see them, and the copy of a box of one into shared memory.
#pragma once
#include "bulk.cuh"

namespace eprt {

struct alignas(64) TensorMap {
  uint64_t word[16];
};

#if __CUDA_ARCH__ >= 900
// The box's bytes count at the barrier.
EPRT_DEVICE void load_box(void* to, const TensorMap* map, int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// The box that begins at tile `tile` of row `row`, tile by tile.
EPRT_DEVICE void load_tiles(void* to, const TensorMap* map, int row, int tile, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared_address(to)),
      "l"(map), "r"(0), "r"(row), "r"(tile), "r"(shared_address(barrier))
      : "memory");
}
#endif

}  // namespace eprt
