// Any bytes as a tokenizer.json. One that is accepted knows every id it claims to have.
#include "data/tokenizer.h"

#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  write_file(scratch() + "/tokenizer.json", text_of(data, size));
  accept_or_refuse([&] {
    const Tokenizer tokenizer = Tokenizer::load(scratch());
    tokenizer.eos();
    std::vector<int32_t> ids = {-1, 0, 1, 2147483647};
    for (int64_t id = 0; id < std::min<int64_t>(tokenizer.vocab_size(), 300); ++id) {
      ids.push_back(static_cast<int32_t>(id));
      require(!tokenizer.name_of(ids.back()).empty(), "an id has no name");
    }
    tokenizer.encode(tokenizer.decode(ids));
  });
  accept_or_refuse([&] { Tokenizer::load(scratch()).encode("1 + 2 = \xff \xf0\x9f\x99\x82 <eos>"); });
  accept_or_refuse([&] { Tokenizer::load(scratch()).encode(text_of(data, std::min<size_t>(size, 4096))); });
  return 0;
}
