// Norm and rotation of rows (turned_rows.h), compiled for any x86-64.
#include "cpu/turned_rows_kernel.h"

namespace eprt::scalar {

void turned_rows(const TurnedRowsArgs& args) { turned_rows_any(args); }

}  // namespace eprt::scalar
