#include "data/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "engine/file.h"

namespace crossply {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    const Exit code = errno == ENOENT || errno == ENOTDIR ? Exit::no_input : Exit::io;
    fail(code, path, ": cannot open: ", std::strerror(errno));
  }
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) fail(Exit::io, path, ": cannot read its size: ", std::strerror(errno));
  if (!S_ISREG(info.st_mode)) fail(Exit::bad_data, path, ": is not a regular file");
  size_ = info.st_size;
  if (size_ == 0) return;  // an empty map does not exist
  void* map = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, file.get(), 0);
  if (map == MAP_FAILED) fail(Exit::io, path, ": cannot map: ", std::strerror(errno));
  data_ = static_cast<const uint8_t*>(map);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size_));
}

}  // namespace crossply
