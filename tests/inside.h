// Tiny models in directories, for the analyses of the program analyze.
#pragma once

#include <map>
#include <sstream>

#include "data/shards.h"
#include "models/json_file.h"
#include "models/model_dir.h"
#include "tests/program.h"
#include "tests/tiny.h"

namespace crossply::test {

// A model with random weights, but for rows whose names have a part of the map's: all of that number.
inline void save_tiny(const std::string& dir, const std::string& choice, int64_t layers = 4, int64_t vocabulary = 7,
                      const std::map<std::string, double>& constants = {}) {
  Config config = tiny_with(choice);
  config.num_hidden_layers = layers, config.vocab_size = vocabulary;
  config.check(Exit::usage, "test");
  const auto device = make_device("cpu");
  ParameterTable params;
  declare_model(params, config);
  params.allocate(*device, Dtype::f32, false);
  params.initialise(1);
  for (Parameter& row : params.rows())
    for (const auto& [part, number] : constants)
      if (has(row.name, part))
        params.write(row, std::vector<double>(static_cast<size_t>(row.shape.numel()), number).data());
  std::filesystem::create_directories(dir);
  save_config(dir + "/config.json", config);
  save_tensors(dir + "/model.safetensors", params, values_of(params, config));
}

// Some tokens below 7.
inline std::string tiny_shard(const TempDir& scratch) {
  std::vector<uint32_t> tokens;
  for (uint64_t i = 0; i < 200; ++i) tokens.push_back(static_cast<uint32_t>(random_bits(5, 1, i) % 7));
  const std::string path = scratch.file("tokens.bin");
  write_shard(path, tokens, ShardFormat::uint16);
  return path;
}

// No line of what it said is wider than a terminal, but for those with a path.
inline void check_width(const Outcome& got, const TempDir& scratch) {
  std::istringstream lines(got.output);
  for (std::string line; std::getline(lines, line);)
    if (!has(line, scratch.path.string())) CHECK_MESSAGE(line.size() <= 80, line);
}

}  // namespace crossply::test
