#include "cpu/mla_kernels.h"

namespace eprt::avx2 {

void mla_decode(const MlaArgs& args) { decode(args); }
void mla_extend(const MlaArgs& args) { extend(args); }

}  // namespace eprt::avx2
