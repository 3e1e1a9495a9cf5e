// The files of a set, opened when they are read. A set may have more files than a process may have open.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/file.h"

namespace crossply {

// What tells a file from another one that has taken its name.
struct FileIdentity {
  uint64_t device = 0, inode = 0, bytes = 0;
  int64_t seconds = 0, nanoseconds = 0;  // of the last change to its contents
  bool operator==(const FileIdentity&) const = default;
  auto number() const { return std::pair(device, inode); }  // names with the same number are names of one file
};
// Exit::io where the system cannot tell.
FileIdentity identity_of(const std::string& path);

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
