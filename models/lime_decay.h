// What the two versions of LIMe share: which of their weights decay.
#pragma once

#include <string>

#include "models/registry.h"

namespace crossply {

// usual: matrices, and of the routers those of lime_dynamic, as in the official code. routers: the routers alone, as
// version 1 can be read.
inline Option lime_decay() {
  return {"decay", "usual", "usual or routers (they alone): which weights decay", {"usual", "routers"}};
}

inline void decay_routers_alone(ParameterTable& params) {
  for (Parameter& row : params.rows()) row.wd_mul = row.router() ? 1 : 0;
}

}  // namespace crossply
