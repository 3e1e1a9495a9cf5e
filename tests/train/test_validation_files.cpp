// A test loss over files that were trained on is said to be one: by the trainer, by compare and by curves.
#include <nlohmann/json.hpp>

#include "data/shards.h"
#include "tests/support/check.h"
#include "tests/support/program.h"

using namespace crossply;
using namespace crossply::test;

namespace {

const std::string note = "note: ", leak = "among the training files: the test loss is of tokens that";

struct Corpus {
  TempDir dir;
  Corpus() {
    for (uint32_t i = 0; i < 3; ++i) {
      std::vector<uint32_t> tokens;
      for (uint32_t t = 0; t < 200; ++t) tokens.push_back((t * t + 7 * i) % 23);
      write_shard(dir.file(i < 2 ? str("train_", i, ".bin") : "val_0.bin"), tokens, ShardFormat::uint16);
    }
  }
  std::vector<std::string> flags(const std::string& data, const std::string& val, const std::string& out) const {
    return split_words("--vocab 23 --seq 8 --width 8 --ffn 8 --layers 1 --heads 1 --batch 2 --steps 1 --data " +
                       dir.file(data) + " --val-data " + dir.file(val) + " --out " + dir.file(out));
  }
};

}  // namespace

TEST_CASE("validation files: the trainer and curves say which are training files, and nothing where none is") {
  const Corpus corpus;
  const Outcome clean = train(corpus.dir, corpus.flags("train_*.bin", "val_*.bin", "clean"));
  check_outcome(clean, Exit::done, "step 1/1");
  CHECK(!has(clean.output, leak));
  const Outcome leaky = train(corpus.dir, corpus.flags("*.bin", "val_*.bin", "leaky"));
  check_outcome(leaky, Exit::done, note + "the validation file val_0.bin is " + leak);
  std::filesystem::copy_file(corpus.dir.file("train_0.bin"), corpus.dir.file("val_1.bin"));
  const Outcome copied = train(corpus.dir, corpus.flags("train_*.bin", "val_*.bin", "copied"));
  check_outcome(copied, Exit::done, note + "1 of the 2 validation files, val_1.bin, is " + leak);

  const auto curves = [&](std::vector<std::string> words) {
    words.insert(words.begin(), "curves");
    return run_program_inside(corpus.dir, words);
  };
  CHECK(!has(curves({corpus.dir.file("clean")}).output, leak));
  check_outcome(curves({corpus.dir.file("clean"), corpus.dir.file("leaky")}), Exit::done,
                note + "'leaky': 1 of 1 validation file is among the training files");
  check_outcome(curves({corpus.dir.file("copied")}), Exit::done, "'copied': 1 of 2 validation files is among");
  CHECK(!has(curves({corpus.dir.file("leaky"), "--loss", "train"}).output, leak));
}

TEST_CASE("validation files: compare says it before its runs, and in its page") {
  const Corpus corpus;
  std::vector<std::string> words = corpus.flags("*.bin", "val_*.bin", "comparison");
  words.insert(words.begin(), {"compare", "--arch", "llama"});
  check_outcome(run_program_inside(corpus.dir, words), Exit::done, note + "the validation file val_0.bin is " + leak);
  CHECK(has(read_text(corpus.dir.file("comparison/results.md")), leak));
}

TEST_CASE("validation files: --steps 0 and --dump-tensors do not read all of the data") {
  const TempDir dir;
  write_shard(dir.file("a.bin"), std::vector<uint32_t>(4 << 20, 5), ShardFormat::uint16);  // 8 MiB
  const auto flags = split_words("--vocab 23 --seq 8 --width 8 --ffn 8 --layers 1 --heads 1 --data " +
                                 dir.file("a.bin") + " --out " + dir.file("out"));
  for (const auto& more : {std::vector<std::string>{"--dump-tensors", "tokens"}, {"--steps", "0"}}) {
    std::vector<std::string> words = flags;
    words.insert(words.end(), more.begin(), more.end());
    std::filesystem::remove_all(dir.file("out"));
    const int64_t before = bytes_read();
    check_outcome(train(dir, words), Exit::done, "wrote");
    CHECK(bytes_read() - before < 4 << 20);
  }
  std::vector<std::string> words = flags;
  words[1] = "5";  // a token is too large: the batch that is looked at is checked all the same
  words.insert(words.end(), {"--dump-tensors", "tokens"});
  std::filesystem::remove_all(dir.file("out"));
  check_outcome(train(dir, words), Exit::bad_data, "vocabulary has only 5");
}
