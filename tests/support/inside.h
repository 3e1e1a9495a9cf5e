// Tiny models in directories, for the analyses of the program analyze.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "data/shards.h"
#include "engine/io/json_file.h"
#include "models/disk/model_dir.h"
#include "tests/support/program.h"
#include "tests/support/tiny.h"

namespace crossply::test {

inline void save_model(const std::string& dir, const ParameterTable& params, const Config& config) {
  std::filesystem::create_directories(dir);
  save_config(dir + "/config.json", config);
  save_tensors(dir + "/model.safetensors", params, values_of(params, config));
}

// The weights of a model of this shape, to be changed and saved.
struct Weights {
  Config config;
  std::unique_ptr<Device> device = make_device("cpu");
  ParameterTable params;

  explicit Weights(const Config& of, uint64_t seed = 1) : config(of) {
    declare_model(params, config);
    params.allocate(*device, Dtype::f32, false);
    params.initialise(seed);
  }
  // All numbers of the rows whose names have this part.
  void fill(const std::string& part, double number) {
    for (Parameter& row : params.rows())
      if (has(row.name, part))
        params.write(row, std::vector<double>(static_cast<size_t>(row.shape.numel()), number).data());
  }
  void save(const std::string& dir) const { save_model(dir, params, config); }
};

// A model with random weights, but for rows whose names have a part of the map's: all of that number.
inline void save_tiny(const std::string& dir, const std::string& choice, int64_t layers = 4, int64_t vocabulary = 7,
                      const std::map<std::string, double>& constants = {}) {
  Config config = tiny_with(choice);
  config.num_hidden_layers = layers, config.vocab_size = vocabulary;
  config.check(Exit::usage, "test");
  Weights weights(config);
  for (const auto& [part, number] : constants) weights.fill(part, number);
  weights.save(dir);
}

// An untrained model with two heads and a tokenizer for this data; returns its directory.
inline std::string untrained(const TempDir& scratch, const std::string& arch, int layers, const std::string& data,
                             int width = 16) {
  const std::string dir = scratch.file(str(arch, layers));
  check_outcome(train(scratch,
                      {"--width", str(width), "--ffn", "16", "--layers", str(layers), "--heads", "2", "--seq", "32",
                       "--steps", "0", "--data", data, "--out", dir},
                      arch),
                Exit::done, "");
  return dir;
}

// So many small letters.
inline std::string letters(int64_t count) {
  std::string text;
  for (int64_t i = 0; i < count; ++i) text += static_cast<char>('a' + random_bits(7, 1, static_cast<uint64_t>(i)) % 26);
  return text;
}

// A text in scratch/text, as data.
inline std::string text_file(const TempDir& scratch, const std::string& text) {
  write_text(scratch.file("text"), text);
  return "text:" + scratch.file("text");
}
inline std::string letters_file(const TempDir& scratch) { return text_file(scratch, letters(3000)); }

// Some tokens below 7.
inline std::string tiny_shard(const TempDir& scratch) {
  std::vector<uint32_t> tokens;
  for (uint64_t i = 0; i < 200; ++i) tokens.push_back(static_cast<uint32_t>(random_bits(5, 1, i) % 7));
  const std::string path = scratch.file("tokens.bin");
  write_shard(path, tokens, ShardFormat::uint16);
  return path;
}

// analyze with these flags, of these models (scratch/MODEL, or a whole path), to scratch/out. last: words that may be
// empty or have spaces.
inline Outcome analyze(const TempDir& scratch, const std::vector<std::string>& models, const std::string& data,
                       const std::string& flags, const std::vector<std::string>& last = {}) {
  std::vector<std::string> words = {"analyze", "--data", data, "--out", scratch.file("out"), "--model"};
  for (const std::string& model : models) words.push_back(scratch.file(model));
  return run_program_inside(scratch, joined(words, split_words(flags), last));
}

// analyze --what WHAT of a LLaMA of two layers, saved at scratch/model with these constants (save_tiny).
inline Outcome analyze_constants(const TempDir& scratch, const std::string& what,
                                 const std::map<std::string, double>& constants) {
  save_tiny(scratch.file("model"), "llama", 2, 7, constants);
  return analyze(scratch, {"model"}, tiny_shard(scratch), str("--what ", what, " --sequences 2 --length 6"));
}

// What analyze wrote to scratch/out.
inline std::string out_text(const TempDir& scratch, const std::string& file) {
  return read_text(scratch.file("out/" + file));
}
inline nlohmann::json out_json(const TempDir& scratch, const std::string& analysis) {
  return read_json(scratch.file("out/" + analysis + ".json"));
}

}  // namespace crossply::test
