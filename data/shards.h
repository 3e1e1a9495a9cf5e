// Token shards in llm.c's two formats, which modded-nanogpt shares: a header of 256 int32, then the tokens.
//
//   header[0] = 20240520, header[1] = 1, header[2] = number of tokens; uint16 tokens
//   header[0] = 20240801, header[1] = 7, header[2] = number of tokens; uint32 tokens
//   header[3] = 1 where the shard knows its tokenizer: header[4] and header[5] are then the lower and the upper half of
//               Tokenizer::fingerprint(), and tokenizer.json lies beside it. Other readers pass over these words.
//
// Or tokens alone, as nanoGPT writes them, where the spec says so: uint16:GLOB, uint32:GLOB.
//
// Window i of a shard is its tokens [i T, i T + T], so every token but a shard's first is a target once (but for a rest
// shorter than T at its end). Windows do not run from one file into the next.
#pragma once

#include <array>

#include "data/source.h"

namespace crossply {

// Opens every shard that matches options.spec, and options.val_spec where it is given; a file of exactly that name wins
// over the pattern. All headers are validated here; the tokens are by Source::check_tokens. Files are opened when they
// are read. After that a file may not change: one that is cut short is Exit::io at the next read, other contents are
// Exit::bad_data where a token is larger than any before, or where the file had been closed since. The
// dataset's tokenizer is that of the shards. Exit::bad_data where the files are of different ones, or where the
// tokenizer.json beside them is another one, no_input where it is missing.
Dataset open_shards(const DataOptions& options);

// The first `count` tokens of one shard, a file or a spec like uint16:FILE; fewer if it has no more.
std::vector<int32_t> read_shard(const std::string& path, int64_t count);

enum class ShardFormat { uint16, uint32 };
constexpr int64_t shard_header_ints = 256, shard_header_bytes = shard_header_ints * 4;
// fingerprint: of the tokenizer; 0: the shard does not say.
std::array<int32_t, shard_header_ints> shard_header(ShardFormat format, int64_t tokens, uint64_t fingerprint);
constexpr int64_t token_bytes(ShardFormat format) { return format == ShardFormat::uint16 ? 2 : 4; }
void write_shard(const std::string& path, const std::vector<uint32_t>& tokens, ShardFormat format,
                 uint64_t fingerprint = 0);

}  // namespace crossply
