// Any bytes as a token shard, and once more with the number of tokens that the file has room for.
#include "data/shards.h"

#include <cstring>

#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

namespace {

void try_file(const std::string& bytes) {
  constexpr int64_t T = 4, V = 50;
  const std::string path = scratch() + "/shard.bin";
  write_file(path, bytes);
  accept_or_refuse([&] { read_shard(path, 7); });
  accept_or_refuse([&] {
    DataOptions options;
    options.spec = path, options.seq_len = T;
    const Dataset dataset = open_dataset(options);
    for (const Source* source : {dataset.train.get(), dataset.test.get()}) {
      source->check_tokens(V);
      std::vector<int32_t> tokens(T), targets(T);
      for (int64_t i = 0; i < source->size(); ++i) {
        source->read(i, tokens.data(), targets.data());
        for (int64_t t = 0; t < T; ++t)
          require(tokens[t] >= 0 && tokens[t] < V && targets[t] >= 0 && targets[t] < V, "a token was not checked");
      }
    }
  });
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(text_of(data, size));
  try_file(bytes);
  constexpr size_t header = 1024;
  if (bytes.size() < header) return 0;
  const auto tokens = static_cast<int32_t>((bytes.size() - header) / (bytes[5] == 0 && bytes[4] == 7 ? 4 : 2));
  std::memcpy(bytes.data() + 8, &tokens, sizeof tokens);
  try_file(bytes);
  return 0;
}
