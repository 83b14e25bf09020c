#include "cpu/index_topk.h"

#include "cpu/isa.h"

namespace eprt {

int64_t index_first_bad_row(const IndexArgs& args) {
  for (int64_t t = 0; t < args.num_rows; ++t) {
    const int64_t request = args.request[t], length = args.length[t];
    if (request < 0 || request >= args.num_requests || length < 0) return t;
    if (t > 0 && request == args.request[t - 1] && length <= args.length[t - 1]) continue;  // pages already checked
    const int64_t num_pages = (length + args.page_size - 1) / args.page_size;
    if (num_pages > args.page_table_width) return t;
    for (int64_t i = 0; i < num_pages; ++i) {
      const int32_t page = args.page_table[request * args.page_table_row + i];
      if (page < 0 || page >= args.num_pages) return t;
    }
  }
  return -1;
}

void index_topk(const IndexArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::index_topk(args);
    case Isa::kAvx2:
      return avx2::index_topk(args);
    case Isa::kAvx512:
      return avx512::index_topk(args);
    case Isa::kAmx:
      return amx::index_topk(args);
  }
}

}  // namespace eprt
