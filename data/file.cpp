#include "data/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "engine/check.h"

namespace crossply {
namespace {

// Closes on every way out of a function.
struct Descriptor {
  int fd;
  ~Descriptor() { if (fd >= 0) ::close(fd); }
};

void write_and_flush(int fd, const std::string& path, std::string_view contents) {
  while (!contents.empty()) {
    const ssize_t n = ::write(fd, contents.data(), contents.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(Exit::io, path, ": cannot write: ", std::strerror(errno));
    contents.remove_prefix(static_cast<size_t>(n));
  }
  if (::fsync(fd) != 0) fail(Exit::io, path, ": cannot flush to the disk: ", std::strerror(errno));
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) {
    const Exit code = errno == ENOENT || errno == ENOTDIR ? Exit::no_input : Exit::io;
    fail(code, path, ": cannot open: ", std::strerror(errno));
  }
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) fail(Exit::io, path, ": cannot read its size: ", std::strerror(errno));
  if (!S_ISREG(info.st_mode)) fail(Exit::bad_data, path, ": is not a regular file");
  size_ = info.st_size;
  if (size_ == 0) return;  // an empty map does not exist
  void* map = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, file.fd, 0);
  if (map == MAP_FAILED) fail(Exit::io, path, ": cannot map: ", std::strerror(errno));
  data_ = static_cast<const uint8_t*>(map);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size_));
}

void write_file(const std::string& path, std::string_view contents) {
  const std::string temporary = path + ".tmp";
  try {
    const Descriptor file{::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
    if (file.fd < 0) fail(Exit::io, temporary, ": cannot create: ", std::strerror(errno));
    write_and_flush(file.fd, temporary, contents);
    if (std::rename(temporary.c_str(), path.c_str()) != 0)
      fail(Exit::io, path, ": cannot rename ", temporary, " to it: ", std::strerror(errno));
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

}  // namespace crossply
