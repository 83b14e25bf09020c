// The indexer's choice (index_topk.h): the suffix of the file name chooses the compiler's flags.
#include "cpu/index_topk_kernel.h"

namespace eprt::scalar {

void index_topk(const IndexArgs& args) { index_topk_any(args); }

}  // namespace eprt::scalar
