#include "train/run/log_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace crossply {

LogFile::LogFile(const std::string& path, bool create) : path_(path) {
  const int flags = O_WRONLY | O_APPEND | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0);
  file_ = Descriptor(uninterrupted([&] { return ::open(path.c_str(), flags, 0666); }));
  if (file_.get() < 0) fail_io("write", path, errno);
}

void LogFile::append(const std::string& bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = uninterrupted([&] { return ::write(file_.get(), bytes.data() + at, bytes.size() - at); });
    if (n < 0) fail_io("write", path_, errno);
    at += static_cast<size_t>(n);
  }
  struct stat status;
  if (::fstat(file_.get(), &status) != 0) fail_io("inspect", path_, errno);
  if (status.st_nlink == 0) fail(Exit::io, path_, " was removed while the run was writing to it");
}

void LogFile::sync() const {
  if (uninterrupted([&] { return ::fsync(file_.get()); }) != 0) fail_io("sync to disk", path_, errno);
}

}  // namespace crossply
