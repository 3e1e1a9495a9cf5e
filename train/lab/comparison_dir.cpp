#include "train/lab/comparison_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

namespace crossply {
namespace {

namespace fs = std::filesystem;

// Whether the path still names this directory: its creator removes it again if it had nothing to write.
bool is_named(int fd, const std::string& path) {
  struct stat held, named;
  return ::fstat(fd, &held) == 0 && ::stat(path.c_str(), &named) == 0 && held.st_dev == named.st_dev &&
         held.st_ino == named.st_ino;
}

}  // namespace

ComparisonDir::~ComparisonDir() {
  if (created_ && is_held()) ::rmdir(path_.c_str());  // fails if it holds anything
}

// False if somebody else has the lock.
bool ComparisonDir::try_lock(const std::string& path) {
  while (true) {
    const bool created = make_directories(path);
    Descriptor opened;
    const bool locked = lock_directory(path, LOCK_EX, &opened);
    if (opened.get() < 0) continue;  // gone
    if (!locked) return false;
    // The same lock, above the descriptors that posix_spawn sets for a run.
    Descriptor held(::fcntl(opened.get(), F_DUPFD, 16));
    if (held.get() < 0) fail_io("hold", path, errno);
    if (!is_named(held.get(), path)) continue;
    path_ = path, lock_ = std::move(held), created_ = created;
    return true;
  }
}

ComparisonDir ComparisonDir::claim(const std::string& path) {
  ComparisonDir dir;
  for (int tries = 0; !dir.try_lock(path); ++tries) {
    if (tries == 30) fail(Exit::usage, path, " is in use by another comparison; wait for it or choose another --out");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return dir;
}

ComparisonDir ComparisonDir::claim_fresh(const std::string& path) {
  for (int number = 1;; ++number) {
    const std::string name = number == 1 ? path : str(path, "-", number);
    std::error_code error;
    if (fs::exists(name, error) && !fs::is_directory(name, error)) continue;
    ComparisonDir dir;
    if (!dir.try_lock(name)) continue;
    const bool empty = fs::is_empty(name, error);
    if (error) fail_io("list", name, error.value());
    if (empty) return dir;
  }
}

}  // namespace crossply
