// Memory that there is not. The message says for what; a program adds which of its flags ask for less.
#pragma once

#include "engine/check.h"

namespace crossply {

struct OutOfMemory : Error {
  using Error::Error;
};

}  // namespace crossply
