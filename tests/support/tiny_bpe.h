// A byte-level BPE tokenizer that fits in a test: the bytes, <|endoftext|> (256), and two merges, th (257), the (258).
#pragma once

#include <string>

#include "data/bpe/bpe.h"
#include "engine/io/json.h"
#include "tests/support/temp_dir.h"

namespace crossply::test {

inline nlohmann::json tiny_bpe_json() {
  nlohmann::json vocab;
  const auto names = byte_names();
  for (size_t b = 0; b < names.size(); ++b) vocab[names[b]] = b;
  vocab["<|endoftext|>"] = 256, vocab["th"] = 257, vocab["the"] = 258;
  const nlohmann::json end = {
      {"id", 256},       {"content", "<|endoftext|>"}, {"single_word", false}, {"lstrip", false},
      {"rstrip", false}, {"normalized", false},        {"special", true}};
  return {{"added_tokens", {end}},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"t h", "th e"}}}}};
}

// Writes it to DIR/tokenizer.json, perhaps without its last merge, and gives that path.
inline std::string write_tiny_bpe(const std::string& dir, bool both_merges = true) {
  nlohmann::json object = tiny_bpe_json();
  if (!both_merges) object["model"]["merges"].erase(1);
  write_text(dir + "/tokenizer.json", json_text(object));
  return dir + "/tokenizer.json";
}

}  // namespace crossply::test
