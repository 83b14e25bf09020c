#include "cpu/mla_kernels.h"

namespace eprt::scalar {

void mla_decode(const MlaArgs& args) { decode(args); }
void mla_extend(const MlaArgs& args) { extend(args); }

}  // namespace eprt::scalar
