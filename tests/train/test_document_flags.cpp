// --documents and --attention-window from the flag to the number: trained, resumed, evaluated, refused.
#include <filesystem>

#include "data/shards.h"
#include "engine/rng.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Documents of 1 to 12 tokens, which end with the token 5.
void write_data(const Scratch& scratch) {
  for (const char* name : {"train_1.bin", "val_1.bin"}) {
    Random random(4, name[0]);
    std::vector<uint32_t> tokens;
    for (int i = 0; i < 900; ++i)
      tokens.push_back(random.below(6) == 0 ? 5 : 6 + static_cast<uint32_t>(random.below(20)));
    write_shard(scratch.file(name), tokens, ShardFormat::uint16);
  }
}

Outcome run(const Scratch& scratch, const std::string& words, const std::string& out,
            const std::string& arch = "lime") {
  return train(
      scratch,
      split_words("--width 16 --ffn 24 --layers 2 --heads 2 --batch 4 --seq 24 --vocab 30 --lr 0.01 --warmup 1 "
                  "--eval-every 2 --eval-samples 0 --data " +
                  scratch.path.string() + " " + words + " --out " + scratch.file(out)),
      arch);
}
std::string loss_of(const Outcome& evaluated) {
  const size_t at = evaluated.output.find("\nloss ");
  return at == std::string::npos ? "none" : evaluated.output.substr(at + 6, 6);
}

}  // namespace

TEST_CASE("--documents: stopped and resumed the bits are the same, and evaluate goes by the run's documents") {
  const Scratch scratch;
  write_data(scratch);
  const std::string says = "tokens attend within documents, which begin after token 5";
  check_outcome(run(scratch, "--steps 6 --documents after --eot 5", "whole"), Exit::done, says);
  check_outcome(run(scratch, "--steps 4 --documents after --eot 5 --schedule constant", "parts"), Exit::done, says);
  check_outcome(run(scratch, "--steps 6 --documents after --eot 5 --schedule constant", "constant"), Exit::done, says);
  check_outcome(train(scratch, {"--resume", "--steps", "6", "--out", scratch.file("parts")}, "lime"), Exit::done, says);
  CHECK(timeless(scratch.file("constant") + "/metrics.jsonl") == timeless(scratch.file("parts") + "/metrics.jsonl"));
  check_outcome(
      train(scratch, {"--resume", "--steps", "8", "--documents", "none", "--out", scratch.file("parts")}, "lime"),
      Exit::usage, "--documents");
  check_outcome(run(scratch, "--steps 6", "across"), Exit::done, "epochs; test set");
  CHECK(timeless(scratch.file("whole") + "/metrics.jsonl") != timeless(scratch.file("across") + "/metrics.jsonl"));

  const auto evaluate = [&](const std::string& more) {
    return run_program_inside(scratch, split_words("evaluate --model " + scratch.file("whole") + " --data " +
                                                   scratch.path.string() + " " + more));
  };
  const Outcome as_trained = evaluate("");
  check_outcome(as_trained, Exit::done, "which begin after token 5");
  CHECK(loss_of(evaluate("--documents auto --eot 5")) == loss_of(as_trained));
  CHECK(loss_of(evaluate("--documents none")) != loss_of(as_trained));
  // The same validation data under another name, which the model attends to as it has learned to.
  std::filesystem::copy_file(scratch.file("val_1.bin"), scratch.file("other.bin"));
  check_outcome(run_program_inside(scratch, split_words("evaluate --model " + scratch.file("whole") + " --data " +
                                                        scratch.file("other.bin"))),
                Exit::done, says);
  std::string metrics = read_text(scratch.file("whole") + "/metrics.jsonl");
  metrics = metrics.substr(metrics.rfind("\n", metrics.size() - 2) + 1);
  CHECK(std::abs(known_json(metrics)["test_loss"].get<double>() - std::stod(loss_of(as_trained))) < 1e-4);
}

TEST_CASE("--documents: what has none, or no token between them, is refused by name") {
  const Scratch scratch;
  write_data(scratch);
  check_outcome(run(scratch, "--steps 2 --documents after", "out"), Exit::usage, "--eot ID");
  check_outcome(run(scratch, "--steps 2 --documents before --eot 999999", "out"), Exit::usage, "between two documents");
  check_outcome(run(scratch, "--steps 2 --eot 5", "out"), Exit::usage, "--documents");
  check_outcome(train(scratch, tiny_run(scratch.file("out"), {"--documents", "auto"})), Exit::usage, "is for files");
  CHECK(!path_exists(scratch.file("out")));
}

TEST_CASE("--attention-window: in training, in the files, in what the run says of another window") {
  const Scratch scratch;
  write_data(scratch);
  const std::string windows = "--steps 2 --attention-window 5 --attention-window-pattern S";
  check_outcome(run(scratch, windows, "lime"), Exit::done, "epochs");
  const auto config = known_json(read_text(scratch.file("lime") + "/step_00000002/config.json"));
  CHECK((config["sliding_window"] == 5 && config["layer_types"] == R"(["sliding_attention", "full_attention"])"_json));
  check_outcome(run(scratch, "--steps 2 --attention-window 5 --attention-window-pattern X", "out"), Exit::usage, "'X'");
  check_outcome(run(scratch, "--steps 2 --attention-window 5 --attention-window-pattern LL", "out"), Exit::usage,
                "of no layer");
  check_outcome(run(scratch, "--steps 2 --attention-window 5", "out", "gpt2"), Exit::usage, "no attention_window");
  check_outcome(run(scratch, "--steps 2 --attention-window 5 --backbone gpt2", "out"), Exit::usage, "attention");
  const Outcome plain = run(scratch, "--steps 2", "plain", "llama"),
                wide = run(scratch, "--steps 2 --attention-window 24", "wide", "llama");
  CHECK(timeless(scratch.file("plain") + "/metrics.jsonl") == timeless(scratch.file("wide") + "/metrics.jsonl"));
  CHECK(known_json(read_text(scratch.file("wide") + "/step_00000002/config.json"))["model_type"] == "ministral");
  const std::string init = " --init " + scratch.file("wide") + " --out ";
  const auto fewer = [&](const std::string& layers) {
    return train(scratch,
                 split_words("--steps 1 --batch 4 --seq 24 --data " + scratch.path.string() + init +
                             scratch.file("of_" + layers) + " --layers " + layers),
                 "llama");
  };
  check_outcome(fewer("1"), Exit::done, "epochs");
  CHECK(known_json(read_text(scratch.file("of_1") + "/step_00000001/config.json"))["model_type"] == "mistral");
}
