#include "cpu/mla.h"

#include "cpu/isa.h"

namespace eprt {

int64_t mla_first_bad_request(const MlaArgs& args) {
  for (int64_t b = 0; b < args.num_requests; ++b) {
    const int64_t seq_len = args.seq_len[b], first = args.first_row(b), end = args.end_row(b);
    if (first < 0 || end < first || end > args.num_rows || end - first > seq_len) return b;
    if (b == 0 && first != 0) return b;
    if (b == args.num_requests - 1 && end != args.num_rows) return b;
    const int64_t num_pages = (seq_len + args.page_size - 1) / args.page_size;
    if (num_pages > args.page_table_width) return b;
    for (int64_t i = 0; i < num_pages; ++i) {
      const int32_t page = args.page_table[b * args.page_table_row + i];
      if (page < 0 || page >= args.num_pages) return b;
    }
  }
  return -1;
}

void mla_decode(const MlaArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::mla_decode(args);
    case Isa::kAvx2:
      return avx2::mla_decode(args);
    case Isa::kAvx512:
      return avx512::mla_decode(args);
    case Isa::kAmx:
      return amx::mla_decode(args);
  }
}

void mla_extend(const MlaArgs& args) {
  switch (cpu_isa()) {
    case Isa::kScalar:
      return scalar::mla_extend(args);
    case Isa::kAvx2:
      return avx2::mla_extend(args);
    case Isa::kAvx512:
      return avx512::mla_extend(args);
    case Isa::kAmx:
      return amx::mla_extend(args);
  }
}

}  // namespace eprt
