// In place of what index_choose.cu has in PTX: shared memory of the other thread block of a cluster. Included inside
// namespace eprt.
struct TensorMap {
  uint64_t word[16];
};
#include "tensor.h"

inline void cluster_barrier() { sync_cluster(); }
template <class T>
inline T load_at(const T* mine, int rank) {
  return *reinterpret_cast<const T*>(at_rank(rank, mine));
}
