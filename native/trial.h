// Whether a set of kernels computes right on this processor: tried once, on a problem so small that it takes a fraction of a
// millisecond.
#pragma once

#include "types.h"

namespace paceline {

// The first operation whose numbers are not those of the portable set, or nullptr.
const char* what_is_wrong(const Kernels&);

}  // namespace paceline
