// --branch: a run that goes on from another one's stable phase has the bits of one that was planned so; and the
// checkpoints that stay.
#include <filesystem>

#include "data/shards.h"
#include "engine/io/json.h"
#include "tests/support/check.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"
#include "train/run/kept.h"
#include "train/run/run_dir.h"

using namespace crossply;
using namespace crossply::test;
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

std::vector<std::string> tiny(const std::string& out, const std::string& more) {
  return tiny_run(out, split_words("--eval-every 5 --save-every 2 --keep 9 --warmup 3 --lr 0.01 " + more));
}

void check_same_run(const std::string& a, const std::string& b, int64_t step) {
  for (const char* file : {"/model.safetensors", "/optimizer.safetensors"})
    CHECK_MESSAGE(read_text(step_dir(a, step) + file) == read_text(step_dir(b, step) + file), file);
  CHECK(timeless(a + "/metrics.jsonl") == timeless(b + "/metrics.jsonl"));
}

}  // namespace

TEST_CASE("branch: it has the bits of the run that had been planned so, and RUN stays as it is") {
  const Scratch scratch;
  const std::string planned = scratch.file("planned"), run = scratch.file("run"), branch = scratch.file("branch");
  struct Case {
    std::string run, plan, branch;  // flags
    int64_t from, steps;
  };
  const std::vector<Case> cases = {
      {"--steps 20 --schedule constant", "--steps 12 --schedule wsd_linear --cooldown 4",
       "--steps 12 --schedule wsd_linear --cooldown 4 --from-step 6", 6, 12},
      {"--steps 20 --schedule wsd_sqrt --lr-floor 0.1", "--steps 30 --schedule wsd_sqrt --lr-floor 0.3 --cooldown 9",
       "--steps 30 --lr-floor 0.3 --cooldown 9", 16, 30},
      {"--steps 8 --schedule constant --optimizer normuon --momentum-warmup 6",
       "--steps 11 --schedule constant --optimizer normuon --momentum-warmup 6", "--steps 11 --from-step 2", 2, 11},
      {"--steps 10 --schedule wsd_linear --dtype bf16", "--steps 7 --schedule wsd_linear --dtype bf16 --cooldown 3",
       "--steps 7 --cooldown 3", 4, 7}};
  for (const Case& c : cases) {
    CAPTURE(c.branch);
    for (const std::string& dir : {planned, run, branch}) fs::remove_all(dir);
    check_outcome(train(scratch, tiny(run, c.run)), Exit::done, "model:");
    check_outcome(train(scratch, tiny(planned, c.plan)), Exit::done, "model:");
    const std::string before = read_text(run + "/metrics.jsonl") + read_text(run + "/flags.json");
    check_outcome(train(scratch, joined(split_words("--branch"), std::vector{run}, split_words(c.branch),
                                        std::vector<std::string>{"--out", branch})),
                  Exit::done, str("a branch of ", run, " after step ", c.from));
    check_same_run(planned, branch, c.steps);
    CHECK(read_text(run + "/metrics.jsonl") + read_text(run + "/flags.json") == before);
    const json flags = known_json(read_text(branch + "/flags.json"));
    CHECK(flags["branch"] == json{{"run", run}, {"step", c.from}});
    // It is a run like any other.
    fs::remove_all(step_dir(branch, c.steps));
    fs::remove_all(run);
    check_outcome(train(scratch, {"--resume", "--out", branch}), Exit::done, "resumed after step");
    check_same_run(planned, branch, c.steps);
    CHECK(known_json(read_text(branch + "/flags.json")) == flags);
  }
}

TEST_CASE("branch: killed before its first checkpoint was there, it is resumed from RUN") {
  const Scratch scratch;
  const std::string run = scratch.file("run"), branch = scratch.file("branch"), other = scratch.file("other");
  check_outcome(train(scratch, tiny(run, "--steps 8 --schedule constant")), Exit::done, "model:");
  check_outcome(train(scratch, {"--branch", run, "--steps", "9", "--out", branch}), Exit::done, "after step 8");
  fs::create_directory(other);
  fs::copy_file(branch + "/flags.json", other + "/flags.json");
  check_outcome(train(scratch, {"--resume", "--out", other}), Exit::done, "resumed after step 8");
  check_same_run(branch, other, 9);
}

TEST_CASE("branch: what no planned run could have had is refused with its numbers, and nothing is written") {
  const Scratch scratch;
  const std::string run = scratch.file("run"), cosine = scratch.file("cosine"), out = scratch.file("out");
  check_outcome(train(scratch, tiny(run, "--steps 10 --schedule wsd_linear --cooldown 4")), Exit::done, "model:");
  check_outcome(train(scratch, tiny(cosine, "--steps 4")), Exit::done, "model:");
  struct Case {
    std::string from, flags, says;
    Exit code = Exit::usage;
  };
  for (const Case& c :
       std::vector<Case>{{run, "--steps 10 --cooldown 6 --from-step 6", "falls after step 4"},
                         {run, "--steps 30 --from-step 8", "falls after step 6"},
                         {run, "--steps 30 --from-step 5", "it has those of step 10, 8, 6, 4, 2", Exit::no_input},
                         {run, "--steps 20 --lr 0.02", "--lr"},
                         {run, "--steps 20 --warmup 2", "--warmup"},
                         {run, "--steps 20 --batch 8", "--batch"},
                         {run, "--steps 20 --seed 8", "--seed"},
                         {run, "--steps 20 --layers 3", "num_hidden_layers"},
                         {run, "--steps 20 --schedule cosine", "constant, wsd_linear or wsd_sqrt"},
                         {run, "--steps 20 --decay-schedule linear", "--decay-schedule"},
                         {run, "--steps 20 --resume", "--resume"},
                         {run, "--steps 5 --cooldown 4", "more than --steps 5"},
                         {cosine, "--steps 20 --schedule constant", "--init"},
                         {scratch.file("none"), "--steps 20", "there is no run", Exit::no_input}}) {
    CAPTURE(c.flags);
    check_outcome(
        train(scratch, joined(std::vector<std::string>{"--branch", c.from, "--out", out}, split_words(c.flags))),
        c.code, c.says);
    CHECK(!fs::exists(out));
  }
  for (const int64_t step : {2, 4, 6}) fs::rename(step_dir(run, step), scratch.file(str("moved", step)));
  check_outcome(train(scratch, {"--branch", run, "--steps", "20", "--out", out}), Exit::no_input, "up to step 6");
  CHECK(!fs::exists(out));
  // A run that has cooled down and went on has had other rates, whatever its flags say.
  check_outcome(train(scratch, {"--resume", "--out", run, "--steps", "20"}), Exit::done, "--branch");
  check_outcome(train(scratch, {"--branch", run, "--steps", "40", "--from-step", "12", "--out", out}), Exit::usage,
                "its step 8 had the rate");
  check_outcome(train(scratch, {"--branch", run, "--steps", "40", "--out", out}, "lime"), Exit::usage,
                "--branch: the run in " + run + " is of train_llama");
}

TEST_CASE("save-at: checkpoints that --keep does not remove, and kept.json that lists them") {
  const Scratch scratch;
  const std::string run = scratch.file("run");
  const int64_t tokens = 4 * 25;  // of a step
  check_outcome(
      train(scratch, tiny(run, "--steps 20 --keep 1 --save-at 1,450,1e3,9e9 --schedule wsd_linear --cooldown 8")),
      Exit::done, "--save-at 9e9: the run ends after 2,000 tokens");
  const auto steps = [&] {
    std::set<int64_t> found;
    const json kept = known_json(read_text(run + "/kept.json"));
    for (const json& entry : kept["checkpoints"]) {
      CHECK(entry["tokens"] == entry["step"].get<int64_t>() * tokens);
      found.insert(entry["step"].get<int64_t>());
    }
    return found;
  };
  CHECK(steps() == std::set<int64_t>{1, 5, 10, 12});
  for (const int64_t step : {1, 5, 10, 12, 20}) CHECK(fs::exists(step_dir(run, step)));
  CHECK(!fs::exists(step_dir(run, 18)));
  check_outcome(train(scratch, {"--resume", "--out", run, "--steps", "26", "--save-at", "2200"}), Exit::done, "model:");
  CHECK(steps() == std::set<int64_t>{1, 5, 10, 12, 22});
  for (const int64_t step : {1, 5, 10, 12, 22, 26}) CHECK(fs::exists(step_dir(run, step)));
  const std::string shards = scratch.file("shards");
  fs::create_directory(shards);
  write_shard(shards + "/train_0.bin", std::vector<uint32_t>(300, 7), ShardFormat::uint16);
  write_text(shards + "/manifest.json", R"({"tokens": 300, "words": 200})");
  for (const std::string& data : {shards, shards + "/train_*.bin"}) {
    fs::remove(shards + "/kept.json");
    KeptCheckpoints(shards, data).add(4, 450);
    CHECK(known_json(read_text(shards + "/kept.json")) ==
          R"({"checkpoints": [{"step": 4, "tokens": 450, "words": 300}]})"_json);
  }
  for (const char* bad : {"x", "1,,2", "0", "1.5", "-3", "1e3,", "inf"})
    check_outcome(train(scratch, tiny(scratch.file("bad"), str("--steps 4 --save-at ", bad))), Exit::usage,
                  "--save-at");
  write_text(run + "/kept.json", "{\"checkpoints\": [3]}");
  check_outcome(train(scratch, {"--resume", "--out", run, "--steps", "30"}), Exit::bad_data, "kept.json");
}
