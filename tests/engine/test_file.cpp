// Files whose system calls are interrupted, do a part of the work, or fail.
#undef _FORTIFY_SOURCE  // its inline wrappers would stand in the way of the functions below
#include "engine/io/file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>

#include "tests/support/data_check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// While armed, the calls of this thread are interrupted every second time, and otherwise move at most three bytes.
struct Trouble {
  static thread_local bool armed;
  static thread_local int calls, interrupted;
  Trouble() { armed = true, calls = interrupted = 0; }
  ~Trouble() { armed = false; }
  static bool interrupt() {
    if (!armed || calls++ % 2 != 0) return false;
    ++interrupted;
    errno = EINTR;
    return true;
  }
  static size_t part(size_t bytes) { return armed ? std::min<size_t>(bytes, 3) : bytes; }
};
thread_local bool Trouble::armed = false;
thread_local int Trouble::calls = 0, Trouble::interrupted = 0;

thread_local std::string synced;  // what fsync was called for

}  // namespace

// In place of the C library's, for the whole test program.
extern "C" {
ssize_t pread(int fd, void* out, size_t bytes, off_t offset) {
  return Trouble::interrupt() ? -1 : ::syscall(SYS_pread64, fd, out, Trouble::part(bytes), offset);
}
ssize_t write(int fd, const void* data, size_t bytes) {
  return Trouble::interrupt() ? -1 : ::syscall(SYS_write, fd, data, Trouble::part(bytes));
}
int fsync(int fd) {
  if (Trouble::interrupt()) return -1;
  struct stat status {};
  synced += ::fstat(fd, &status) == 0 && S_ISDIR(status.st_mode) ? "directory " : "file ";
  return static_cast<int>(::syscall(SYS_fsync, fd));
}
int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const unsigned mode = flags & O_CREAT ? va_arg(rest, unsigned) : 0;
  va_end(rest);
  return Trouble::interrupt() ? -1 : static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}
}

TEST_CASE("file: interrupted and partial reads and writes are continued") {
  const TempDir dir;
  const std::string text = "a text of more than three bytes";
  {
    const Trouble trouble;
    write_file_atomically(dir.file("a"), text);
    CHECK(Trouble::interrupted > 10);
  }
  CHECK(read_text(dir.file("a")) == text);
  {
    const Trouble trouble;
    CHECK(read_file(dir.file("a"), text.size()) == text);
    CHECK(Trouble::interrupted > 10);
    sync_file(dir.file("a"));
  }
  check_fails(Exit::bad_data, {"31 bytes", "30"}, [&] { read_file(dir.file("a"), text.size() - 1); });
}

TEST_CASE("file: a file is on the disk before its name is, and the name before the write is done") {
  const TempDir dir;
  synced.clear();
  write_file_atomically(dir.file("a"), "a text");
  CHECK(synced == "file directory ");
}

TEST_CASE("file: more descriptors are asked for before they run out") {
  rlimit before{}, after{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit usual{1024, before.rlim_max};
  if (before.rlim_max <= 1024 || ::setrlimit(RLIMIT_NOFILE, &usual) != 0) return;
  const TempDir dir;
  write_text(dir.file("a"), "1");
  std::vector<InputFile> files;
  for (int i = 0; i < 1000; ++i) files.emplace_back(dir.file("a"));
  ::getrlimit(RLIMIT_NOFILE, &after);
  ::setrlimit(RLIMIT_NOFILE, &before);
  CHECK(after.rlim_cur > 1024);
}

TEST_CASE("file: one that became shorter is an error") {
  const TempDir dir;
  write_text(dir.file("a"), "123456");
  const InputFile file(dir.file("a"));
  std::filesystem::resize_file(dir.file("a"), 4);
  char out[6];
  file.read(0, out, 4);
  check_fails(Exit::io, {"2 bytes early", "shortened"}, [&] { file.read(0, out, 6); });
}
