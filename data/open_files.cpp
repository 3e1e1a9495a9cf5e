#include "data/open_files.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

namespace crossply {

FileIdentity identity_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail_io("inspect", path, errno);
  return {status.st_dev, status.st_ino, static_cast<uint64_t>(status.st_size), status.st_mtim.tv_sec,
          status.st_mtim.tv_nsec};
}

OpenFiles::OpenFiles() {
  rlimit limit{};
  const bool known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0;
  slots_.resize(std::clamp<size_t>(known ? limit.rlim_max / 4 : 1, 1, 4096));
}

std::shared_ptr<const InputFile> OpenFiles::open(size_t index, const std::string& path,
                                                 const std::function<void(const InputFile&)>& opened) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index % slots_.size()];
  if (slot.file == nullptr || slot.index != index) {
    slot.file = nullptr;  // closed before the next one is opened
    auto file = std::make_shared<const InputFile>(path);
    opened(*file);
    slot = {index, std::move(file)};
  }
  return slot.file;
}

}  // namespace crossply
