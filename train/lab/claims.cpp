#include "train/lab/claims.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>

namespace crossply {

bool Claims::take(const std::string& run) {
  if (held_.contains(run)) return true;
  make_directories(directory_);
  const std::string path = directory_ + "/" + run;
  Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (file.get() < 0) fail_io("create", path, errno);
  if (uninterrupted([&] { return ::flock(file.get(), LOCK_EX | LOCK_NB); }) != 0 && errno == EWOULDBLOCK) return false;
  // The same lock, above the descriptors that posix_spawn sets for a run.
  Descriptor held(::fcntl(file.get(), F_DUPFD_CLOEXEC, 16));
  if (held.get() < 0) fail_io("hold", path, errno);
  held_[run] = std::move(held);
  return true;
}

bool Claims::is_elsewhere(const std::string& run) {
  if (held_.contains(run)) return false;
  const bool free = take(run);
  if (free) give_back(run);
  return !free;
}

}  // namespace crossply
