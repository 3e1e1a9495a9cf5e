#include "engine/io/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "engine/io/leftovers.h"
#include "engine/platform.h"

namespace crossply {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

bool is_full(int error) { return error == ENOSPC || error == EDQUOT; }

std::string parent_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

bool raise_descriptor_limit() {
  const int error = errno;
  rlimit limit{};
  bool raised = ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max;
  limit.rlim_cur = limit.rlim_max;
  raised = raised && ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
  errno = error;
  return raised;
}

int open_file(const std::string& path, int flags) {
  const auto open = [&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); };
  int fd = uninterrupted(open);
  if (fd < 0 && errno == EMFILE && raise_descriptor_limit()) fd = uninterrupted(open);
  if (fd > 900) raise_descriptor_limit();  // mostly 1024: who opens without asking for more shall find some left
  return fd;
}

void sync(const std::string& path, int flags) {
  const Descriptor fd(open_file(path, flags | O_RDONLY));
  if (fd.get() < 0) fail_io("open", path, errno);
  const int result = uninterrupted([&] { return ::fsync(fd.get()); });
  // Some network file systems cannot sync a directory and say EINVAL: there is nothing more to be done there.
  if (result != 0 && !(errno == EINVAL && (flags & O_DIRECTORY))) fail_io("sync to disk", path, errno);
}

// Where a write to `path` must go: a link's target, so that the rename does not replace the link by a file.
std::string writable_target(const std::string& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) return path;  // new, or a problem that open will report
  if (!S_ISREG(status.st_mode)) fail(Exit::io, "cannot write ", path, ": it exists and is not a regular file");
  std::error_code error;
  const auto target = std::filesystem::canonical(path, error);
  return error ? path : target.string();
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

void fail_io(const std::string& action, const std::string& path, int error) {
  const char* hint = is_full(error) ? ": free some space and try again" : "";
  fail(Exit::io, "cannot ", action, " ", path, ": ", reason(error), hint);
}

bool path_exists(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::symlink_status(path, error);
  if (status.type() == std::filesystem::file_type::none) fail_io("look for", path, error.value());
  return status.type() != std::filesystem::file_type::not_found;
}

InputFile::InputFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a pipe must not wait for a writer; it has no effect on regular files.
  fd_ = Descriptor(open_file(path, O_RDONLY | O_NONBLOCK));
  if (fd_.get() < 0 && (errno == ENOENT || errno == ENOTDIR)) {
    fail(Exit::no_input, "cannot open ", path, ": ", reason(errno), ": check the path");
  }
  if (fd_.get() < 0) fail_io("open", path, errno);
  struct stat status;
  if (::fstat(fd_.get(), &status) != 0) fail_io("inspect", path, errno);
  if (!S_ISREG(status.st_mode)) fail(Exit::bad_data, path, ": is not a regular file");
  const timespec modified = modified_time(status);
  identity_ = {static_cast<uint64_t>(status.st_dev), status.st_ino, static_cast<uint64_t>(status.st_size),
               modified.tv_sec, modified.tv_nsec};
}

void InputFile::read(uint64_t offset, void* out, uint64_t bytes) const {
  char* to = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t n = uninterrupted([&] { return ::pread(fd_.get(), to, bytes, static_cast<off_t>(offset)); });
    if (n < 0) fail_io("read", path_, errno);
    if (n == 0)
      fail(Exit::io, "cannot read ", path_, ": it ends ", bytes, " bytes early: it was shortened while in use");
    to += n, offset += static_cast<uint64_t>(n), bytes -= static_cast<uint64_t>(n);
  }
}

OutputFile::OutputFile(const std::string& path, uint64_t bytes) : path_(writable_target(path)), expected_(bytes) {
  temporary_ = temporary_sibling(path_);
  remove_leftovers_of(path_);
  fd_ = Descriptor(open_file(temporary_, O_WRONLY | O_CREAT | O_EXCL));
  if (fd_.get() < 0) {
    const int error = errno;
    temporary_.clear();
    fail_io("create", path_, error);
  }
}

OutputFile::~OutputFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::fail_write(int error) const {
  if (!is_full(error)) fail_io("write", path_, error);
  struct statvfs disk;
  const bool known = ::statvfs(parent_of(path_).c_str(), &disk) == 0;
  const uint64_t available = known ? disk.f_bavail * disk.f_frsize : 0;
  const uint64_t missing = expected_ > written_ ? expected_ - written_ : 0;
  fail(Exit::io, error == EDQUOT ? "disk quota exceeded" : "no space left on device", " while writing ", path_,
       ": free ", missing > available ? missing - available : missing, " bytes or choose another directory (", written_,
       " of ", expected_, " bytes fitted)");
}

void OutputFile::write(const void* data, uint64_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = uninterrupted([&] { return ::write(fd_.get(), from, bytes); });
    if (n < 0) fail_write(errno);
    from += n, written_ += static_cast<uint64_t>(n), bytes -= static_cast<uint64_t>(n);
  }
}

void OutputFile::commit() {
  // A full disk may show up only here, because the system writes behind our back.
  if (uninterrupted([&] { return ::fsync(fd_.get()); }) != 0) fail_write(errno);
  // Linux lets go of the descriptor even when a signal interrupts; what was written is on the disk already.
  if (::close(fd_.release()) != 0 && errno != EINTR) fail_write(errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_io("rename " + temporary_ + " to", path_, errno);
  temporary_.clear();
  sync_directory(parent_of(path_));
}

std::string read_file(const std::string& path, uint64_t most) {
  const InputFile file(path);
  if (file.size() > most)
    fail(Exit::bad_data, path, ": has ", file.size(), " bytes, more than the ", most, " that such a file may have");
  std::string contents(file.size(), '\0');
  file.read(0, contents.data(), contents.size());
  return contents;
}

bool file_holds(const std::string& path, const std::string& contents) {
  try {
    return read_file(path, contents.size()) == contents;
  } catch (const Error&) {  // a file that cannot be read does not
    return false;
  }
}

void write_file_atomically(const std::string& path, const std::string& contents) {
  OutputFile file(path, contents.size());
  file.write(contents.data(), contents.size());
  file.commit();
}

bool make_directories(const std::string& path) {
  std::error_code error;
  const bool created = std::filesystem::create_directories(path, error);
  if (error) fail_io("create", path, error.value());
  return created;
}

bool lock_directory(const std::string& dir, int how, Descriptor* lock) {
  *lock = Descriptor(uninterrupted([&] { return ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (lock->get() < 0 && errno == ENOENT) return false;
  if (lock->get() < 0) fail_io("open", dir, errno);
  return uninterrupted([&] { return ::flock(lock->get(), how | LOCK_NB); }) == 0 || errno != EWOULDBLOCK;
}

void sync_directory(const std::string& dir) { sync(dir, O_DIRECTORY); }
void sync_file(const std::string& path) { sync(path, 0); }

std::string temporary_sibling(const std::string& path) {
  const std::filesystem::path p(path);
  return (p.parent_path() / str(".tmp-", p.filename().string(), "-", ::getpid())).string();
}

}  // namespace crossply
