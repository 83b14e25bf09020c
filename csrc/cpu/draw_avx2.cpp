// Sampling of tokens (draw.h), compiled for AVX2: the suffix of the file name chooses the compiler's flags.
#include "cpu/draw_kernel.h"

namespace eprt::avx2 {

void draw(const DrawArgs& args) { draw_any(args); }
void largest(const LargestArgs& args) { largest_any(args); }

}  // namespace eprt::avx2
