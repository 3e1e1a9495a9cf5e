// The bytes of a file, a pipe or standard input; unpacked where they begin as gzip or zstd does, whatever the name.
#pragma once

#include <memory>
#include <string>

#include "engine/io/file.h"
#include "engine/io/sha256.h"

namespace crossply {

class ByteStream {
 public:
  // path: "-" is standard input. Throws Exit::no_input, io.
  explicit ByteStream(const std::string& path);
  ~ByteStream();
  ByteStream(const ByteStream&) = delete;
  ByteStream& operator=(const ByteStream&) = delete;

  const std::string& name() const { return name_; }  // for messages
  bool is_packed() const { return packed_ != nullptr; }
  // As many bytes as asked for; fewer at the end only. Throws io, Exit::bad_data where what is packed is damaged or
  // ends early, and Exit::stopped where a stop is requested while a pipe has nothing yet.
  size_t read(char* out, size_t bytes);
  // How many bytes of the file itself have been taken, and at the end their digest.
  uint64_t taken() const { return taken_; }
  std::string sha256() { return sha_.hex(); }

 private:
  struct Packed;  // the unpacking library's state
  void fill();
  bool only_zeros();
  size_t unpack(char* out, size_t bytes);
  [[noreturn]] void fail_damaged(const std::string& what) const;

  std::string name_;
  Descriptor fd_;
  std::string buffer_;                 // raw bytes from begin_ on
  size_t begin_ = 0, room_ = 1 << 14;  // room_: to read next
  bool is_file_ = false;               // else it may have to be waited for
  bool at_end_ = false;                // of the file
  uint64_t taken_ = 0;
  Sha256 sha_;
  std::unique_ptr<Packed> packed_;  // null: plain
};

}  // namespace crossply
