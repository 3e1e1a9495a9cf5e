// Files: reads that know the size, and writes that either complete or leave what was there before. Every failure is an
// Error that names the file and the system's reason.
#pragma once

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "engine/check.h"

namespace crossply {

// A file descriptor with one owner.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Exit::io with "cannot ACTION PATH: REASON"; a full disk gets a hint.
[[noreturn]] void fail_io(const std::string& action, const std::string& path, int error);

// Whether there is something of that name, be it a dangling link. Exit::io if that cannot be known.
bool path_exists(const std::string& path);

// Calls it again for as long as a signal interrupts it.
template <class F>
auto uninterrupted(F&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// A regular file open for reading. A missing file is Exit::no_input, anything else that fails is Exit::io. It holds a
// descriptor; where a process may have only few at a time, as many are asked for as the system allows.
// What tells a file from another one that has taken its name.
struct FileIdentity {
  uint64_t device = 0, inode = 0, bytes = 0;
  int64_t seconds = 0, nanoseconds = 0;  // of the last change to its contents
  bool operator==(const FileIdentity&) const = default;
  auto number() const { return std::pair(device, inode); }  // names with the same number are names of one file
};

class InputFile {
 public:
  explicit InputFile(const std::string& path);
  const std::string& path() const { return path_; }
  uint64_t size() const { return identity_.bytes; }
  const FileIdentity& identity() const { return identity_; }
  // Reads exactly `bytes` bytes at `offset`; a file that became shorter meanwhile is an error.
  void read(uint64_t offset, void* out, uint64_t bytes) const;

 private:
  std::string path_;
  Descriptor fd_;
  FileIdentity identity_;
};

// Writes to a temporary sibling, .tmp-NAME-PID, which takes the place of `path` at commit(), after it has reached the
// disk. Without commit() nothing changes. A symbolic link is followed; a device or a directory is refused.
class OutputFile {
 public:
  OutputFile(const std::string& path, uint64_t bytes);  // bytes: how many will be written, for the full-disk message
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  void write(const void* data, uint64_t bytes);
  void commit();

 private:
  [[noreturn]] void fail_write(int error) const;
  std::string path_, temporary_;
  Descriptor fd_;
  uint64_t expected_, written_ = 0;
};

// The whole of a regular file, at most `most` bytes; more are Exit::bad_data.
std::string read_file(const std::string& path, uint64_t most);

// Whether the file is there and has these contents.
bool file_holds(const std::string& path, const std::string& contents);

void write_file_atomically(const std::string& path, const std::string& contents);

// Creates a directory and those above it; whether it was not there. Throws Exit::io.
bool make_directories(const std::string& path);

// Opens a directory and locks it; false if it is gone, which leaves no descriptor, or another's lock is in the way.
// A file system without locks behaves as if no other process held one. how: LOCK_EX or LOCK_SH.
bool lock_directory(const std::string& dir, int how, Descriptor* lock);

// Makes the names in a directory durable; without it a power loss may undo a rename.
void sync_directory(const std::string& dir);
// Makes the contents of a file durable.
void sync_file(const std::string& path);

// The temporary sibling of a file or directory: DIR/.tmp-NAME-PID.
std::string temporary_sibling(const std::string& path);

// Runs write(). Returns what its I/O error says, or "" if there is none; other errors pass.
template <class F>
std::string io_error_of(F&& write) {
  try {
    write();
  } catch (const Error& error) {
    if (error.code != Exit::io) throw;
    return error.what();
  }
  return "";
}
// Runs all of them, also those behind one that fails. Returns what the first I/O error says, as io_error_of.
template <class... F>
std::string first_io_error_of(F&&... writes) {
  std::string first;
  const auto attempt = [&](auto& write) {
    const std::string error = io_error_of(write);
    if (first.empty()) first = error;
  };
  (attempt(writes), ...);
  return first;
}

}  // namespace crossply
