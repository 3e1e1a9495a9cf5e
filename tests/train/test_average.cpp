// average: the mean of checkpoints of a run.
#include <filesystem>

#include "engine/io/json.h"
#include "engine/io/safetensors.h"
#include "models/disk/checkpoint.h"
#include "tests/support/check.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"
#include "train/run/run_dir.h"

using namespace crossply;
using namespace crossply::test;
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

std::map<std::string, std::vector<float>> weights_in(const std::string& dir) {
  const SafetensorsFile file(dir + "/model.safetensors");
  std::map<std::string, std::vector<float>> all;
  for (const TensorInfo& info : file.tensors()) {
    all[info.name].resize(static_cast<size_t>(info.numel()));
    file.read_f32(info, all[info.name].data());
  }
  return all;
}

// A run with checkpoints after steps 2, 4 and 6.
std::string trained(const Scratch& scratch, const std::string& arch = "llama") {
  const std::string run = scratch.file("run");
  check_outcome(
      train(scratch, tiny_run(run, split_words("--steps 6 --save-every 2 --keep 9 --lr 0.01 --warmup 1")), arch),
      Exit::done, "model:");
  return run;
}

Outcome average(const Scratch& scratch, const std::string& run, const std::string& flags, const std::string& out) {
  return run_program_inside(scratch, joined(split_words("average --model"), std::vector{run},
                                            split_words(flags + " --out"), std::vector{out}));
}

}  // namespace

TEST_CASE("average: every weight is the mean in double, rounded once, whatever the order of the steps") {
  const Scratch scratch;
  for (const char* arch : {"llama", "mudd"}) {
    CAPTURE(arch);
    fs::remove_all(scratch.file("run"));
    const std::string run = trained(scratch, arch);
    struct Case {
      const char* flags;
      std::vector<std::pair<int64_t, double>> parts;
    };
    for (const Case& c : std::vector<Case>{{"--last 2", {{4, 1}, {6, 1}}},
                                           {"--steps 6,2,4", {{2, 1}, {4, 1}, {6, 1}}},
                                           {"--steps 6,2 --weights 0.3,1.5", {{2, 1.5}, {6, 0.3}}},
                                           {"--steps 4 --weights 3", {{4, 1}}}}) {
      CAPTURE(c.flags);
      const std::string out = scratch.file("mean");
      fs::remove_all(out);
      check_outcome(average(scratch, run, c.flags, out), Exit::done, "mean of");
      std::map<std::string, std::vector<double>> sums;
      double shares = 0;
      for (const auto& [step, share] : c.parts) {
        for (const auto& [name, values] : weights_in(step_dir(run, step))) {
          sums[name].resize(values.size());
          for (size_t i = 0; i < values.size(); ++i) sums[name][i] += share * static_cast<double>(values[i]);
        }
        shares += share;
      }
      const auto found = weights_in(out);
      CHECK(found.size() == sums.size());
      for (const auto& [name, values] : found)
        for (size_t i = 0; i < values.size(); ++i)
          CHECK_THAT(values[i] == static_cast<float>(sums.at(name)[i] / shares), name, " ", i, ": ", values[i]);
      check_manifest(out);
      const json origin = known_json(read_text(out + "/average.json"));
      CHECK(origin["mean_of"].size() == c.parts.size());
      for (size_t i = 0; i < c.parts.size(); ++i) CHECK(origin["mean_of"][i]["step"] == c.parts[i].first);
    }
  }
}

TEST_CASE("average: the model is tested on what its run did not see, and training goes on from it by --init") {
  const Scratch scratch;
  const std::string run = trained(scratch), out = scratch.file("mean"), next = scratch.file("next");
  check_outcome(average(scratch, run, "--last 3", out), Exit::done, "2, 4, 6");
  check_outcome(run_program_inside(scratch, {"evaluate", "--model", out, "--data", "arith:3", "--answers", "0"}),
                Exit::done, "kept from training");
  check_outcome(
      train(scratch, joined(split_words("--data arith:3 --train-samples 100 --test-samples 20 --steps 1 --init"),
                            std::vector{out, std::string("--out"), next})),
      Exit::done, "model:");
}

TEST_CASE("average: what makes no mean is refused, and nothing is written") {
  const Scratch scratch;
  const std::string run = trained(scratch), out = scratch.file("mean");
  const auto refused = [&](Exit code, const std::string& flags, const std::string& says) {
    CAPTURE(flags);
    const Outcome got = average(scratch, run, flags, out);
    check_outcome(got, code, says);
    CHECK(!fs::exists(out));
  };
  refused(Exit::usage, "", "--last or --steps");
  refused(Exit::usage, "--last 4", "has 3 checkpoints, of the steps 2, 4, 6");
  refused(Exit::usage, "--last 0", "--last");
  refused(Exit::usage, "--last 2 --steps 2", "--last");
  refused(Exit::usage, "--last 2 --weights 1,2", "--steps");
  refused(Exit::usage, "--steps 2,5", "no checkpoint of step 5; it has those of 2, 4, 6");
  refused(Exit::usage, "--steps 2,4,2", "has 2 twice");
  for (const char* bad : {"2,x", "2,,4", "-2", "2.5", "1e99", "99999999999999999999"})
    refused(Exit::usage, std::string("--steps ") + bad, "is no");
  refused(Exit::usage, "--steps 2,4 --weights 1", "1 numbers for 2 checkpoints");
  for (const char* bad : {"1,0", "1,-1", "1,inf", "1,nan", "1,1e999"})
    refused(Exit::usage, std::string("--steps 2,4 --weights ") + bad, "is no number above 0");
  check_outcome(average(scratch, step_dir(run, 2), "--last 1", out), Exit::usage, "is one model");
  check_outcome(average(scratch, scratch.file("none"), "--last 1", out), Exit::no_input, "none");
  fs::create_directory(out);
  write_text(out + "/note", "mine");
  check_outcome(average(scratch, run, "--last 2", out), Exit::usage, "exists and is not empty");
  CHECK(read_text(out + "/note") == "mine");
  fs::remove_all(out);

  SUBCASE("of a damaged checkpoint") {
    const std::string path = step_dir(run, 4) + "/model.safetensors";
    std::string bytes = read_text(path);
    bytes.back() ^= 1;
    write_text(path, bytes);
    refused(Exit::bad_data, "--last 2", "model.safetensors");
    check_outcome(average(scratch, run, "--steps 2,6", out), Exit::done, "mean of");
  }
  SUBCASE("of another model") {
    json config = known_json(read_text(step_dir(run, 4) + "/config.json"));
    config["rms_norm_eps"] = 0.5;
    replace_files(step_dir(run, 4), {{"config.json", json_text(config)}});
    refused(Exit::usage, "--last 2", "of another model");
  }
}
