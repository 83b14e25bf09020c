#include "cpu/mla_kernels.h"

namespace eprt::amx {

void mla_decode(const MlaArgs& args) { decode(args); }
void mla_extend(const MlaArgs& args) { extend(args); }

}  // namespace eprt::amx
