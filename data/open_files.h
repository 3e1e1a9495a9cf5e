// The files of a set, opened when they are read. A set may have more files than a process may have open.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/io/file.h"

namespace crossply {

class OpenFiles {
 public:
  // At most a quarter of the files that the process may open are open at a time, and at most 4096.
  OpenFiles();
  // File `index` of the set; any thread may call this. The file stays open while the caller holds the pointer. Where it
  // is opened here, opened(file) is called first, which may throw. Throws as InputFile.
  std::shared_ptr<const InputFile> open(size_t index, const std::string& path,
                                        const std::function<void(const InputFile&)>& opened);

 private:
  struct Slot {
    size_t index = 0;
    std::shared_ptr<const InputFile> file;
  };
  std::mutex mutex_;
  std::vector<Slot> slots_;  // file i has slot i % size
};

}  // namespace crossply
