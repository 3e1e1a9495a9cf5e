#include "data/open_files.h"

#include <sys/resource.h>

#include <algorithm>

namespace crossply {

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
