// Any file as a sequence of bytes, cut into consecutive windows of T + 1 that do not overlap: T tokens, and the same
// shifted by one as targets. The last tenth of the windows (at least one) is the test set.
#pragma once

#include "data/source.h"

namespace crossply {

Dataset open_text(const std::string& path, const DataOptions& options);

}  // namespace crossply
