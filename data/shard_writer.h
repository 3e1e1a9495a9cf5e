// Token shards written piece by piece: DIR/NAME_000001.bin, NAME_000002.bin, ..., all but the last of one size. Until
// finish() their headers are zeros, which no reader takes for a shard.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/shards.h"
#include "engine/io/file.h"

namespace crossply {

struct ShardLayout {
  std::string dir, name;
  ShardFormat format = ShardFormat::uint16;
  int64_t shard_tokens = 100'000'000;             // of a file
  std::string advice = "write all of them anew";  // where files are not as they were written
  std::string path(int64_t index) const;          // index: from 0
  int64_t files(int64_t tokens) const;
};

// 64 bits of tokens in their order, however they are cut into pieces: of those before, and these.
uint64_t token_digest(uint64_t before, const std::vector<int32_t>& ids);

class ShardWriter {
 public:
  // Goes on after the first `tokens` tokens that were written before; what is behind them is removed. Throws
  // Exit::bad_data where there are fewer.
  ShardWriter(ShardLayout layout, int64_t tokens);
  void append(const std::vector<int32_t>& ids);
  int64_t tokens() const { return tokens_; }
  void flush();  // what was appended is on the disk
  // Flushes, and writes the headers.
  void finish(uint64_t fingerprint);
  // The tokens from `first` on, at most so many; they must have been flushed.
  std::vector<int32_t> read(int64_t first, int64_t count) const;
  // Of the first so many, read from the disk. Throws Exit::stopped after a signal.
  uint64_t digest(int64_t tokens) const;

 private:
  void open(int64_t index);
  void write_waiting();
  ShardLayout layout_;
  int64_t tokens_;
  int64_t opened_ = -1;  // which file
  Descriptor fd_;
  std::vector<int32_t> waiting_;  // after the last of tokens_ that was written
  int64_t written_;
};

}  // namespace crossply
