#include "cpu/shared_attention.h"

#include "cpu/isa.h"

namespace eprt {
namespace {

bool entries_fit(const SharedAttentionArgs& args, int64_t row) {
  const int64_t num = args.num_entries[row], request = args.request[row];
  if (num < 0) return false;
  if (args.slot != nullptr) {
    if (num > args.slot_width) return false;
    for (int64_t i = 0; i < num; ++i) {
      const int64_t at = args.slot[row * args.slot_width + i];
      if (at < 0 || at >= args.num_pages * args.page_entries) return false;
    }
    return true;
  }
  if (num == 0) return true;
  const int64_t pages = (num + args.page_entries - 1) / args.page_entries;
  if (request < 0 || request >= args.num_requests || pages > args.table_width) return false;
  for (int64_t i = 0; i < pages; ++i) {
    const int64_t page = args.table[request * args.table_width + i];
    if (page < 0 || page >= args.num_pages) return false;
  }
  return true;
}

}  // namespace

int64_t shared_attention_first_bad_row(const SharedAttentionArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t begin = args.local_begin[row], end = args.local_end[row];
    if (begin < 0 || end < begin || end > args.num_local || !entries_fit(args, row)) return row;
  }
  return -1;
}

int64_t pool_first_bad_row(const PoolArgs& args) {
  for (int64_t i = 0; i < args.rows * args.slots; ++i) {
    if (args.index[i] < -1 || args.index[i] >= args.num_states) return i / args.slots;
  }
  return -1;
}

void shared_attention(const SharedAttentionArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::shared_attention(args);
    case Isa::kAvx2:
      return avx2::shared_attention(args);
    default:
      return avx512::shared_attention(args);
  }
}

void pool_entries(const PoolArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::pool_entries(args);
    case Isa::kAvx2:
      return avx2::pool_entries(args);
    default:
      return avx512::pool_entries(args);
  }
}

}  // namespace eprt
