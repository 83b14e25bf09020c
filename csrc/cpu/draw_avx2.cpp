#include "cpu/draw_kernel.h"

namespace eprt::avx2 {

void draw(const DrawArgs& args) { draw_any(args); }

}  // namespace eprt::avx2
