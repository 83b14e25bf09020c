// Norm and rotation of rows (turned_rows.h), compiled for AVX-512: the suffix of the file name chooses the compiler's
// flags.
#include "cpu/turned_rows_kernel.h"

namespace eprt::avx512 {

void turned_rows(const TurnedRowsArgs& args) { turned_rows_any(args); }

}  // namespace eprt::avx512
