#include "data/byte_stream.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "cli/stop.h"
#include "engine/memory.h"

namespace crossply {
namespace {

constexpr size_t max_room = 1 << 18;
constexpr size_t magic_bytes = 4;

bool is_gzip(std::string_view bytes) { return bytes.starts_with("\x1f\x8b"); }

// The first may be a frame to be skipped: pzstd's sizes, or a note.
bool is_zstd(std::string_view bytes) {
  const bool skippable = bytes.size() >= magic_bytes && (static_cast<unsigned char>(bytes[0]) & 0xF0) == 0x50 &&
                         bytes.substr(1).starts_with("\x2a\x4d\x18");
  return skippable || bytes.starts_with("\x28\xb5\x2f\xfd");
}

// The largest window of zstd, as a power of 2, that half of the memory has room for. The format allows 2 GB.
int largest_window_log() {
  const uint64_t room = available_memory() / 2;
  int log = ZSTD_dParam_getBounds(ZSTD_d_windowLogMax).upperBound;
  while (log > 20 && uint64_t{1} << log > room) --log;
  return log;
}

// Until there is something to read. A signal need not reach this thread, so it looks now and then.
void wait_for(int fd, const std::string& name) {
  pollfd one{fd, POLLIN, 0};
  int ready = 0;
  while (ready == 0 || (ready < 0 && errno == EINTR)) {
    if (stop_requested()) fail(Exit::stopped, "stopped while reading ", name);
    ready = ::poll(&one, 1, 100);
  }
}

}  // namespace

struct ByteStream::Packed {
  Packed(bool as_gzip, const std::string& name) : gzip(as_gzip) {
    constexpr int gzip_window = 15 + 16;  // the largest window; 16: with gzip's header
    if (gzip ? inflateInit2(&z, gzip_window) != Z_OK : (zstd = ZSTD_createDStream()) == nullptr)
      fail(Exit::device, name, ": out of memory for unpacking");
    if (!gzip) ZSTD_DCtx_setParameter(zstd, ZSTD_d_windowLogMax, window_log = largest_window_log());
  }
  ~Packed() {
    if (gzip) inflateEnd(&z);
    else ZSTD_freeDStream(zstd);
  }
  bool gzip;
  int window_log = 0;
  z_stream z{};
  ZSTD_DStream* zstd = nullptr;
  bool between = false;  // one part is complete, and no other one begun
};

ByteStream::ByteStream(const std::string& path) : name_(path == "-" ? "standard input" : path) {
  fd_ =
      Descriptor(path == "-" ? ::dup(STDIN_FILENO)
                             : uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC); }));
  if (fd_.get() < 0 && (errno == ENOENT || errno == ENOTDIR))
    fail(Exit::no_input, "cannot open ", path, ": ", std::strerror(errno), ": check the path");
  if (fd_.get() < 0) fail_io("open", name_, errno);
  struct stat status {};
  if (::fstat(fd_.get(), &status) == 0 && S_ISDIR(status.st_mode)) fail_io("read", name_, EISDIR);
  is_file_ = S_ISREG(status.st_mode);
  while (buffer_.size() < magic_bytes && !at_end_) fill();
  const bool gzip = is_gzip(buffer_);
  if (gzip || is_zstd(buffer_)) packed_ = std::make_unique<Packed>(gzip, name_);
}

ByteStream::~ByteStream() = default;

void ByteStream::fail_damaged(const std::string& what) const {
  fail(Exit::bad_data, name_, ": the ", packed_->gzip ? "gzip" : "zstd", " data ", what, " at byte ",
       taken_ - (buffer_.size() - begin_), "; pack it anew");
}

// Adds what one read gives to the buffer.
void ByteStream::fill() {
  if (begin_ == buffer_.size()) buffer_.clear(), begin_ = 0;
  const size_t before = buffer_.size();
  buffer_.resize(before + room_);
  ssize_t n = -1;
  do {
    if (!is_file_) wait_for(fd_.get(), name_);
    n = ::read(fd_.get(), buffer_.data() + before, room_);
  } while (n < 0 && (errno == EINTR || errno == EAGAIN));
  if (n < 0) fail_io("read", name_, errno);
  buffer_.resize(before + static_cast<size_t>(n));
  sha_.update(buffer_.data() + before, static_cast<size_t>(n));
  taken_ += static_cast<uint64_t>(n);
  at_end_ = n == 0;
  room_ = std::min(2 * room_, max_room);
}

// Whether nothing else follows: tapes and some copies end in zeros.
bool ByteStream::only_zeros() {
  while (true) {
    const size_t other = buffer_.find_first_not_of('\0', begin_);
    if (other != std::string::npos) return false;
    begin_ = buffer_.size();
    if (at_end_) return true;
    fill();
  }
}

size_t ByteStream::read(char* out, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    if (begin_ == buffer_.size() && !at_end_) fill();
    if (begin_ == buffer_.size() && (!packed_ || packed_->between)) break;
    if (packed_ && packed_->gzip && packed_->between && buffer_[begin_] == '\0' && only_zeros()) break;
    const size_t n = packed_ ? unpack(out + done, bytes - done) : std::min(bytes - done, buffer_.size() - begin_);
    if (!packed_) std::memcpy(out + done, buffer_.data() + begin_, n), begin_ += n;
    done += n;
  }
  return done;
}

// Some of the bytes that the buffer holds packed; a file may be several packed ones, one behind the other.
size_t ByteStream::unpack(char* out, size_t bytes) {
  const size_t have = buffer_.size() - begin_;
  const auto checked = [&](size_t produced) {  // after the last byte the library may still have something to give
    if (have == 0 && produced == 0 && !packed_->between) fail_damaged("ends early");
    return produced;
  };
  if (!packed_->gzip) {
    ZSTD_inBuffer in{buffer_.data() + begin_, have, 0};
    ZSTD_outBuffer to{out, bytes, 0};
    const size_t left = ZSTD_decompressStream(packed_->zstd, &to, &in);
    const ZSTD_ErrorCode error = ZSTD_getErrorCode(left);
    if (error == ZSTD_error_memory_allocation || error == ZSTD_error_frameParameter_windowTooLarge)
      fail(Exit::device, name_, ": out of memory: the zstd data needs a window of more than ",
           (uint64_t{1} << packed_->window_log) / 1'000'000, " MB to unpack, for which memory is missing; ",
           "pack it anew without --long and --ultra, or unpack it elsewhere");
    if (ZSTD_isError(left) != 0) fail_damaged(std::string("is damaged (") + ZSTD_getErrorName(left) + ")");
    begin_ += in.pos;
    packed_->between = left == 0;
    return checked(to.pos);
  }
  z_stream& z = packed_->z;
  if (packed_->between && inflateReset(&z) != Z_OK) fail_damaged("is damaged");
  const auto limit = [](size_t n) { return static_cast<uInt>(std::min<size_t>(n, 1 << 30)); };
  z.next_in = reinterpret_cast<Bytef*>(buffer_.data() + begin_), z.avail_in = limit(have);
  z.next_out = reinterpret_cast<Bytef*>(out), z.avail_out = limit(bytes);
  const int result = inflate(&z, Z_NO_FLUSH);
  if (result == Z_MEM_ERROR) fail(Exit::device, name_, ": out of memory for unpacking");
  if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR)
    fail_damaged(std::string("is damaged (") + (z.msg != nullptr ? z.msg : "unknown reason") + ")");
  begin_ += limit(have) - z.avail_in;
  packed_->between = result == Z_STREAM_END;
  return checked(limit(bytes) - z.avail_out);
}

}  // namespace crossply
