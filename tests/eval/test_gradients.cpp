// The program gradients, where there is nothing to write.
#include <nlohmann/json.hpp>

#include "eval/loaded_model.h"
#include "models/disk/model_dir.h"
#include "tests/support/check.h"
#include "tests/support/program.h"

using namespace crossply;
using namespace crossply::test;

TEST_CASE("gradients: one that is not finite ends with 77 by name, and nothing is written or replaced") {
  const TempDir dir;
  write_text(dir.file("text"), std::string(100, 'a'));
  const std::string source = dir.file("model"), out = dir.file("grads.safetensors");
  check_outcome(
      train(dir, split_words("--width 8 --ffn 8 --layers 1 --heads 1 --seq 4 --tie false --steps 0 --data text:" +
                             dir.file("text") + " --out " + source)),
      Exit::done, "wrote");
  write_text(dir.file("tokens"), "1 2");
  const std::vector<std::string> words = {"gradients", "--model", source,  "--tokens", dir.file("tokens"),
                                          "--seq",     "1",       "--out", out};
  check_outcome(run_program_inside(dir, words), Exit::done, "loss ");
  const std::string before = read_text(out);
  {
    // A tiny last norm before a huge head: the logits are of usual size, what flows back is beyond fp32.
    LoadedModel model(source, "cpu", false);
    const auto fill = [&](const std::string& name, double value, int64_t first, double of_first) {
      const Parameter& row = model.params.at(name);
      std::vector<double> values(static_cast<size_t>(row.shape.numel()), value);
      const int64_t width = row.shape[row.shape.rank - 1];
      if (first >= 0) std::fill_n(values.begin() + first * width, width, of_first);
      model.params.write(row, values.data());
    };
    fill("model.embed_tokens.weight", 100, -1, 0);
    fill("model.norm.weight", 2e-38, -1, 0);
    fill("lm_head.weight", 3e38, 2, -3e38);  // the target's logit is by far the smallest
    save_tensors(source + "/model.safetensors", model.params, values_of(model.params, model.config));
  }
  std::filesystem::remove(source + "/manifest.json");
  const Outcome bad = run_program_inside(dir, words);
  check_outcome(bad, Exit::not_finite, "tensor \"");
  check_outcome(bad, Exit::not_finite, "nothing was written");
  CHECK(!has(bad.output, "loss is not finite"));
  CHECK(read_text(out) == before);
}
