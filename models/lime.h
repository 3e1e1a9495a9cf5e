#pragma once

#include "models/registry.h"

namespace crossply {

// LIMe v2: attention over key/value heads routed from all layers so far. See lime.cpp.
Architecture lime_architecture();

}  // namespace crossply
