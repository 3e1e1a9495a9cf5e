// Files of the data room are read through a memory map.
#pragma once

#include <cstdint>
#include <string>

namespace crossply {

// A whole file, read-only. A map holds no file descriptor, so a run may have thousands of shards open. The file must
// not be shortened while it is mapped: reading behind its new end kills the process.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  MappedFile& operator=(MappedFile&&) = delete;

  const std::string& path() const { return path_; }
  const uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  std::string path_;
  const uint8_t* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace crossply
