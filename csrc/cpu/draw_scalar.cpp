#include "cpu/draw_kernel.h"

namespace eprt::scalar {

void draw(const DrawArgs& args) { draw_any(args); }
void largest(const LargestArgs& args) { largest_any(args); }

}  // namespace eprt::scalar
