#include "engine/rng.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "engine/check.h"

namespace crossply {

uint64_t system_random_bits() {
  uint64_t bits = 0;
  if (::getentropy(&bits, sizeof bits) != 0) fail(Exit::io, "getentropy: ", std::strerror(errno));
  return bits;
}

}  // namespace crossply
