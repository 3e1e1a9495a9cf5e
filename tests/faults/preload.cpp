// Loaded in front of the C library (LD_PRELOAD): counts the calls that concern files below one directory, and lets one
// of them fail, or ends the process there. tests/faults/faults.cpp says which, by the environment:
//
//   FAULT_DIR    the current directory: calls on paths below it, and on descriptors opened there, count
//   FAULT_LOG    a file that gets a line for every one of them: its name and its path
//   FAULT_AT     which one, counted from 1
//   FAULT_KIND   what happens to it: a number of errno; or short (half of the bytes), kill (before the call), tear
//                (kill after half of the bytes)
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int max_descriptors = 1024;
std::string opened[max_descriptors];  // the path below FAULT_DIR of a descriptor; empty if it is none of ours

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

struct FaultPlan {
  std::string dir = variable("FAULT_DIR"), kind = variable("FAULT_KIND");
  long at = std::atol(variable("FAULT_AT").c_str()), count = 0;
  // By the system call itself: the functions here are the ones that are replaced.
  int log = static_cast<int>(
      ::syscall(SYS_openat, AT_FDCWD, variable("FAULT_LOG").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
};

FaultPlan& plan() {
  static FaultPlan the_plan;
  return the_plan;
}

// The part of a path behind FAULT_DIR/; "" for every other path.
std::string below(const char* path) {
  const std::string& dir = plan().dir;
  if (path == nullptr || dir.empty()) return "";
  if (path[0] != '/') return path;
  const bool inside = std::strncmp(path, dir.c_str(), dir.size()) == 0;
  return inside && path[dir.size()] == '/' ? path + dir.size() + 1 : "";
}
std::string below(int fd) { return fd >= 0 && fd < max_descriptors ? opened[fd] : ""; }
std::string below_at(int fd, const char* path) {
  if (fd == AT_FDCWD || path[0] == '/') return below(path);
  const std::string dir = below(fd);
  return dir.empty() ? "" : dir + "/" + path;
}

enum class Fate { pass, fail, shorten, tear };

// Counts a call on one of our paths and says what becomes of it.
Fate fate(const char* call, const std::string& path) {
  if (path.empty()) return Fate::pass;
  FaultPlan& p = plan();
  ++p.count;
  const std::string line = std::string(call) + " " + path + "\n";
  if (p.log >= 0) (void)!::syscall(SYS_write, p.log, line.data(), line.size());
  if (p.count != p.at) return Fate::pass;
  if (p.kind == "kill") ::kill(::getpid(), SIGKILL);
  if (p.kind == "short") return Fate::shorten;
  if (p.kind == "tear") return Fate::tear;
  errno = std::atoi(p.kind.c_str());
  return Fate::fail;
}

template <class F>
F* next(F*, const char* name) {
  return reinterpret_cast<F*>(::dlsym(RTLD_NEXT, name));
}

int remember(int fd, const std::string& path) {
  if (fd >= 0 && fd < max_descriptors) opened[fd] = path;
  return fd;
}

// open's third argument, which is there only if the flags ask for it. O_TMPFILE is more than one bit.
int mode_of(int flags, va_list rest) {
  return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, int) : 0;
}

// A read or a write of `bytes`; `transfer` does it for as many as it is given.
template <class F>
ssize_t moved(const char* call, int fd, size_t bytes, F&& transfer) {
  switch (fate(call, below(fd))) {
    case Fate::fail: return -1;
    case Fate::shorten: return transfer(bytes / 2 + bytes % 2);
    case Fate::tear: transfer(bytes / 2), ::kill(::getpid(), SIGKILL); return -1;
    default: return transfer(bytes);
  }
}

}  // namespace

#define NEXT(name) static auto* const real = next(&::name, #name)

extern "C" {

#define REPLACE_OPEN(name)                           \
  int name(const char* path, int flags, ...) {       \
    NEXT(name);                                      \
    va_list rest;                                    \
    va_start(rest, flags);                           \
    const int mode = mode_of(flags, rest);           \
    va_end(rest);                                    \
    const std::string ours = below(path);            \
    if (fate("open", ours) == Fate::fail) return -1; \
    return remember(real(path, flags, mode), ours);  \
  }
REPLACE_OPEN(open)
REPLACE_OPEN(open64)

// Only the standard library opens like this, and only directories.
#define REPLACE_OPENAT(name)                             \
  int name(int dir, const char* path, int flags, ...) {  \
    NEXT(name);                                          \
    va_list rest;                                        \
    va_start(rest, flags);                               \
    const int mode = mode_of(flags, rest);               \
    va_end(rest);                                        \
    const std::string ours = below_at(dir, path);        \
    if (fate("opendir", ours) == Fate::fail) return -1;  \
    return remember(real(dir, path, flags, mode), ours); \
  }
REPLACE_OPENAT(openat)
REPLACE_OPENAT(openat64)

#define REPLACE_FOPEN(name)                               \
  FILE* name(const char* path, const char* mode) {        \
    NEXT(name);                                           \
    const std::string ours = below(path);                 \
    if (fate("open", ours) == Fate::fail) return nullptr; \
    FILE* file = real(path, mode);                        \
    if (file != nullptr) remember(::fileno(file), ours);  \
    return file;                                          \
  }
REPLACE_FOPEN(fopen)
REPLACE_FOPEN(fopen64)

int close(int fd) {
  NEXT(close);
  const Fate end = fate("close", below(fd));
  const int error = errno;
  remember(fd, "");
  const int result = real(fd);  // a descriptor is closed even if close() fails
  if (end != Fate::fail) return result;
  errno = error;
  return -1;
}

ssize_t read(int fd, void* out, size_t bytes) {
  NEXT(read);
  return moved("read", fd, bytes, [&](size_t n) { return real(fd, out, n); });
}
ssize_t write(int fd, const void* data, size_t bytes) {
  NEXT(write);
  return moved("write", fd, bytes, [&](size_t n) { return real(fd, data, n); });
}
#define REPLACE_PREAD(name)                                                              \
  ssize_t name(int fd, void* out, size_t bytes, off_t offset) {                          \
    NEXT(name);                                                                          \
    return moved("read", fd, bytes, [&](size_t n) { return real(fd, out, n, offset); }); \
  }
REPLACE_PREAD(pread)
REPLACE_PREAD(pread64)
ssize_t writev(int fd, const iovec* parts, int count) {
  NEXT(writev);
  return moved("write", fd, static_cast<size_t>(count), [&](size_t n) { return real(fd, parts, static_cast<int>(n)); });
}

#define REPLACE_MMAP(name)                                                              \
  void* name(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) { \
    NEXT(name);                                                                         \
    if (fate("mmap", below(fd)) == Fate::fail) return MAP_FAILED;                       \
    return real(at, bytes, protection, flags, fd, offset);                              \
  }
REPLACE_MMAP(mmap)
REPLACE_MMAP(mmap64)

// Of a descriptor.
#define REPLACE_FD(name, parameters, arguments)          \
  int name parameters {                                  \
    NEXT(name);                                          \
    if (fate(#name, below(fd)) == Fate::fail) return -1; \
    return real arguments;                               \
  }
REPLACE_FD(fsync, (int fd), (fd))
REPLACE_FD(fdatasync, (int fd), (fd))
REPLACE_FD(flock, (int fd, int operation), (fd, operation))
REPLACE_FD(fstat, (int fd, struct stat* out), (fd, out))
REPLACE_FD(ftruncate, (int fd, off_t size), (fd, size))

// Of a path.
#define REPLACE_PATH(name, parameters, arguments)          \
  int name parameters {                                    \
    NEXT(name);                                            \
    if (fate(#name, below(path)) == Fate::fail) return -1; \
    return real arguments;                                 \
  }
REPLACE_PATH(mkdir, (const char* path, mode_t mode), (path, mode))
REPLACE_PATH(unlink, (const char* path), (path))
REPLACE_PATH(rmdir, (const char* path), (path))
REPLACE_PATH(remove, (const char* path), (path))
REPLACE_PATH(truncate, (const char* path, off_t size), (path, size))
REPLACE_PATH(stat, (const char* path, struct stat* out), (path, out))
REPLACE_PATH(lstat, (const char* path, struct stat* out), (path, out))

int unlinkat(int dir, const char* path, int flags) {
  NEXT(unlinkat);
  if (fate("unlink", below_at(dir, path)) == Fate::fail) return -1;
  return real(dir, path, flags);
}

int rename(const char* from, const char* to) {
  NEXT(rename);
  if (fate("rename", below(to)) == Fate::fail) return -1;
  return real(from, to);
}
int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  NEXT(renameat2);
  if (fate("rename", below_at(to_dir, to)) == Fate::fail) return -1;
  return real(from_dir, from, to_dir, to, flags);
}

char* realpath(const char* path, char* out) {
  static auto* const real = next(static_cast<char* (*)(const char*, char*)>(::realpath), "realpath");
  if (fate("realpath", below(path)) == Fate::fail) return nullptr;
  return real(path, out);
}

DIR* opendir(const char* path) {
  NEXT(opendir);
  const std::string ours = below(path);
  if (fate("opendir", ours) == Fate::fail) return nullptr;
  DIR* dir = real(path);
  if (dir != nullptr) remember(::dirfd(dir), ours);
  return dir;
}
int closedir(DIR* dir) {
  NEXT(closedir);
  remember(::dirfd(dir), "");
  return real(dir);
}
#define REPLACE_READDIR(name, Entry)                                        \
  Entry* name(DIR* dir) {                                                   \
    NEXT(name);                                                             \
    if (fate("readdir", below(::dirfd(dir))) == Fate::fail) return nullptr; \
    return real(dir);                                                       \
  }
REPLACE_READDIR(readdir, dirent)
REPLACE_READDIR(readdir64, dirent64)

}  // extern "C"
