// Token shards in llm.c's two formats: a header of 256 int32, then the tokens.
//
//   header[0] = 20240520, header[1] = 1, header[2] = number of tokens; uint16 tokens
//   header[0] = 20240801, header[1] = 7, header[2] = number of tokens; uint32 tokens
//
// Window i of a shard is its tokens [i T, i T + T], so every token but a shard's first is a target once (but for a rest
// shorter than T at its end). Windows do not run from one file into the next.
#pragma once

#include "data/source.h"

namespace crossply {

// Opens every shard that matches options.spec, and options.val_spec where it is given; a file of exactly that name wins
// over the pattern. All headers are validated here; the tokens are by Source::check_tokens. After that a file may not
// change: one that is cut short is Exit::io at the next read, a token larger than any before Exit::bad_data.
Dataset open_shards(const DataOptions& options);

// The files that a pattern matches, in order. Throws Exit::no_input if there is none, io if one cannot be told.
std::vector<std::string> shard_paths(const std::string& pattern);

// The first `count` tokens of one shard, fewer if it has no more.
std::vector<int32_t> read_shard(const std::string& path, int64_t count);

enum class ShardFormat { uint16, uint32 };
void write_shard(const std::string& path, const std::vector<uint32_t>& tokens, ShardFormat format);

}  // namespace crossply
