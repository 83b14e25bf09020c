// Hyper-connections (streams.h): the suffix of the file name chooses the compiler's flags.
#include "cpu/streams_kernels.h"

namespace eprt::scalar {

void stream_mix(const StreamMixArgs& args) { stream_mix_any(args); }
void stream_expand(const StreamExpandArgs& args) { stream_expand_any(args); }

}  // namespace eprt::scalar
