// Thrown when an allocation fails; the message names what it was for. A program adds which of its flags ask for less.
#pragma once

#include "engine/check.h"

namespace crossply {

struct OutOfMemory : Error {
  using Error::Error;
};

}  // namespace crossply
