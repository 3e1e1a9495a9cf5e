#include "data/shard_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "cli/stop.h"

namespace crossply {
namespace {

constexpr int64_t max_waiting = 1 << 20;  // tokens

void write_at(int fd, const std::string& path, const void* data, size_t bytes, int64_t offset) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = uninterrupted([&] { return ::pwrite(fd, from, bytes, static_cast<off_t>(offset)); });
    if (n < 0) fail_io("write", path, errno);
    from += n, bytes -= static_cast<size_t>(n), offset += n;
  }
}

}  // namespace

std::string ShardLayout::path(int64_t index) const {
  char number[32];
  std::snprintf(number, sizeof number, "%06lld", static_cast<long long>(index + 1));
  return dir + "/" + name + "_" + number + ".bin";
}

int64_t ShardLayout::files(int64_t tokens) const { return (tokens + shard_tokens - 1) / shard_tokens; }

uint64_t token_digest(uint64_t before, const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) before = std::rotl((before ^ static_cast<uint32_t>(id)) * 0x9E3779B97F4A7C15ull, 29);
  return before;
}

ShardWriter::ShardWriter(ShardLayout layout, int64_t tokens)
    : layout_(std::move(layout)), tokens_(tokens), written_(tokens) {
  const int64_t files = layout_.files(tokens), each = token_bytes(layout_.format);
  int64_t end = files;
  while (path_exists(layout_.path(end))) ++end;
  while (end > files)  // the last one first: a kill leaves no gap
    if (const std::string path = layout_.path(--end); ::unlink(path.c_str()) != 0) fail_io("remove", path, errno);
  if (files == 0) return;
  for (int64_t i = 0; i < files; ++i)
    if (!path_exists(layout_.path(i)))
      fail(Exit::bad_data, layout_.path(i), ": is missing, but tokens were written into it; ", layout_.advice);
  open(files - 1);
  const int64_t bytes = shard_header_bytes + (tokens - (files - 1) * layout_.shard_tokens) * each;
  const InputFile last(layout_.path(files - 1));
  if (static_cast<int64_t>(last.size()) < bytes)
    fail(Exit::bad_data, last.path(), ": has ", last.size(), " bytes, but ", bytes, " were written; somebody cut it; ",
         layout_.advice);
  if (uninterrupted([&] { return ::ftruncate(fd_.get(), bytes); }) != 0) fail_io("cut", last.path(), errno);
}

void ShardWriter::open(int64_t index) {
  if (opened_ == index) return;
  const std::string path = layout_.path(index);
  if (fd_.get() >= 0 && uninterrupted([&] { return ::fsync(fd_.get()); }) != 0)
    fail_io("write", layout_.path(opened_), errno);
  fd_ = Descriptor(uninterrupted([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666); }));
  if (fd_.get() < 0) fail_io("create", path, errno);
  opened_ = index;
  const std::vector<char> header(shard_header_bytes, 0);
  write_at(fd_.get(), path, header.data(), header.size(), 0);
}

void ShardWriter::append(const std::vector<int32_t>& ids) {
  waiting_.insert(waiting_.end(), ids.begin(), ids.end());
  tokens_ += std::ssize(ids);
  if (std::ssize(waiting_) >= max_waiting) write_waiting();
}

void ShardWriter::write_waiting() {
  const auto each = static_cast<size_t>(token_bytes(layout_.format));
  std::string bytes;
  for (size_t begin = 0; begin < waiting_.size();) {
    const int64_t index = written_ / layout_.shard_tokens, place = written_ % layout_.shard_tokens;
    const size_t n = std::min(waiting_.size() - begin, static_cast<size_t>(layout_.shard_tokens - place));
    bytes.resize(n * each);
    for (size_t i = 0; i < n; ++i) std::memcpy(&bytes[i * each], &waiting_[begin + i], each);  // little-endian
    open(index);
    write_at(fd_.get(), layout_.path(index), bytes.data(), bytes.size(),
             shard_header_bytes + place * static_cast<int64_t>(each));
    begin += n, written_ += static_cast<int64_t>(n);
  }
  waiting_.clear();
}

void ShardWriter::flush() {
  write_waiting();
  if (fd_.get() >= 0 && uninterrupted([&] { return ::fsync(fd_.get()); }) != 0)
    fail_io("write", layout_.path(opened_), errno);
}

void ShardWriter::finish(uint64_t fingerprint) {
  flush();
  for (int64_t i = 0; i < layout_.files(tokens_); ++i) {
    open(i);
    const int64_t count = std::min(layout_.shard_tokens, tokens_ - i * layout_.shard_tokens);
    const auto header = shard_header(layout_.format, count, fingerprint);
    write_at(fd_.get(), layout_.path(i), header.data(), sizeof header, 0);
  }
  flush();
}

std::vector<int32_t> ShardWriter::read(int64_t first, int64_t count) const {
  const int64_t index = first / layout_.shard_tokens, place = first % layout_.shard_tokens;
  const int64_t n = std::min({count, layout_.shard_tokens - place, tokens_ - first}),
                each = token_bytes(layout_.format);
  const InputFile file(layout_.path(index));
  const int64_t end = shard_header_bytes + (place + n) * each;
  if (static_cast<int64_t>(file.size()) < end)
    fail(Exit::bad_data, file.path(), ": has ", file.size(), " bytes, but ", end, " were written; somebody cut it; ",
         layout_.advice);
  std::string bytes(static_cast<size_t>(n * each), '\0');
  file.read(static_cast<uint64_t>(shard_header_bytes + place * each), bytes.data(), bytes.size());
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (size_t i = 0; i < ids.size(); ++i)
    std::memcpy(&ids[i], &bytes[i * static_cast<size_t>(each)], static_cast<size_t>(each));
  return ids;
}

uint64_t ShardWriter::digest(int64_t tokens) const {
  uint64_t digest = 0;
  for (int64_t at = 0; at < tokens;) {
    const std::vector<int32_t> ids = read(at, std::min<int64_t>(1 << 20, tokens - at));
    digest = token_digest(digest, ids);
    if (stop_requested())
      fail(Exit::stopped, "stopped while checking the tokens in ", layout_.dir,
           "; the same command goes on from there");
    at += std::ssize(ids);
  }
  return digest;
}

}  // namespace crossply
