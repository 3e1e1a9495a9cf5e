// Modelling files that an older version has written: every program says so, and transplant --refresh rewrites them.
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <thread>

#include "engine/io/json.h"
#include "models/disk/checkpoint.h"
#include "models/disk/modelling_file.h"
#include "tests/support/check.h"
#include "tests/support/program.h"

using namespace crossply;
using namespace crossply::test;
namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;
const std::string lime_file = "modeling_crossply_lime.py", told = "is not what this build writes";

const std::vector<std::string> data = {"--data",         "arith:3", "--train-samples", "8", "--test-samples",   "4",
                                       "--eval-samples", "4",       "--batch",         "2", "--answer-samples", "0"};

// A run of two checkpoints, whose modelling files are of another version. Returns its directory.
std::string older_run(const TempDir& scratch) {
  const std::string run = scratch.file("run");
  const Outcome trained = train(scratch,
                                joined<std::string>({"--steps", "2", "--save-every", "1", "--keep", "2", "--width",
                                                     "16", "--layers", "2", "--heads", "2", "--out", run},
                                                    data),
                                "lime");
  check_outcome(trained, Exit::done, "");
  for (const char* step : {"/step_00000001", "/step_00000002"})
    REQUIRE(replace_files(run + step, {{lime_file, "an older text\n"}}) == std::vector<std::string>{lime_file});
  return run;
}

// Every file of a directory, with its time of change, but for these.
std::map<std::string, std::string> others_in(const std::string& dir, const std::vector<std::string>& besides) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(dir)) {
    const std::string name = entry.path().filename();
    if (!entry.is_regular_file() || std::find(besides.begin(), besides.end(), name) != besides.end()) continue;
    const auto changed = fs::last_write_time(entry).time_since_epoch();
    files[entry.path()] =
        str(std::chrono::duration_cast<std::chrono::nanoseconds>(changed).count(), read_text(entry.path()));
  }
  return files;
}

void check_valid(const std::string& dir) {
  std::string why;
  CHECK_MESSAGE(is_valid_checkpoint(dir, &why), why);
}

// With its long lines in one piece.
Outcome refresh(const TempDir& scratch, const std::string& dir) {
  Outcome got = run_program_inside(scratch, {"transplant", "--refresh", dir});
  const std::string broken = "\n  ";
  for (size_t at = got.output.find(broken); at != std::string::npos; at = got.output.find(broken, at))
    got.output.replace(at, broken.size(), " ");
  return got;
}

}  // namespace

TEST_CASE("refresh: every program that opens an older modelling file says so in one line, and --refresh ends that") {
  const TempDir scratch;
  const std::string run = older_run(scratch), step = run + "/step_00000002";
  int number = 0;
  // A program says it once for each directory: a link is another name, as another process would be.
  const auto programs = [&] {
    std::vector<std::vector<std::string>> all;
    for (const std::string& model : {run, step}) {
      const std::string link = scratch.file(str("link_", ++number)), out = scratch.file(str("out_", number));
      const auto linked = [&](const std::string& name) {
        fs::create_directory_symlink(model, link + name);
        return link + name;
      };
      all.push_back({"evaluate", "--model", linked("a"), "--data", "arith:3", "--test-samples", "4"});
      all.push_back({"generate", "--model", linked("b"), "--prompt", "1 + 1 =", "--max-new", "2"});
      all.push_back(joined<std::string>({"train_lime", "--init", linked("c"), "--steps", "0", "--out", out}, data));
      all.push_back(joined<std::string>({"train_llama", "--teacher", linked("d"), "--steps", "1", "--width", "16",
                                         "--layers", "1", "--heads", "2", "--out", out + "_taught"},
                                        data));
      all.push_back({"transplant", "--model", linked("e"), "--blocks", "0", "--out", out + "_half"});
    }
    fs::copy(run, scratch.file(str("again_", number)), fs::copy_options::recursive);
    all.push_back({"train_lime", "--resume", "--steps", "3", "--out", scratch.file(str("again_", number))});
    return all;
  };
  for (const auto& words : programs()) {
    CAPTURE(words[0] + " " + words[1]);
    const Outcome got = run_program_inside(scratch, words);
    check_outcome(got, Exit::done, "note: ");
    CHECK_MESSAGE(count_of(got.output, told) == 1, got.output);
    CHECK_MESSAGE(has(got.output, "build/transplant --refresh\n"), got.output);
  }
  const auto before = others_in(run, {lime_file, "manifest.json"});
  const Outcome got = refresh(scratch, run);
  check_outcome(got, Exit::done, "step_00000001: rewrote " + lime_file);
  check_outcome(got, Exit::done, "step_00000002: rewrote " + lime_file);
  CHECK(others_in(run, {lime_file, "manifest.json"}) == before);
  for (const char* name : {"/step_00000001", "/step_00000002"}) {
    check_valid(run + name);
    CHECK(has(read_text(run + name + "/manifest.json"), lime_file));
    CHECK(read_text(run + name + "/" + lime_file) == modelling_file("lime"));
  }
  const auto complete = others_in(run, {});
  check_outcome(refresh(scratch, step), Exit::done, "nothing to rewrite");
  CHECK(others_in(run, {}) == complete);
  for (const auto& words : programs()) {
    const Outcome quiet = run_program_inside(scratch, words);
    check_outcome(quiet, Exit::done, "");
    CHECK_MESSAGE(count_of(quiet.output, told) == 0, quiet.output);
  }
}

TEST_CASE("refresh: a directory from before there were modelling files gets one, and config.json names it") {
  const TempDir scratch;
  const std::string step = older_run(scratch) + "/step_00000002";
  auto config = known_json<nlohmann::ordered_json>(read_text(step + "/config.json"));
  const Json auto_map = config["auto_map"];
  config.erase("auto_map");
  config["architectures"] = {"CrossplyForCausalLM"};
  replace_files(step, {{"config.json", json_text(config, 2)}});
  fs::remove(step + "/" + lime_file);
  fs::remove(step + "/manifest.json");  // without one, no file is checked, and none is made
  check_outcome(refresh(scratch, step), Exit::done, "rewrote " + lime_file + ", config.json");
  CHECK(read_text(step + "/" + lime_file) == modelling_file("lime"));
  const auto after = known_json<nlohmann::ordered_json>(read_text(step + "/config.json"));
  CHECK(after["auto_map"] == auto_map);
  CHECK(after["architectures"] == Json{"CrossplyLimeForCausalLM"});
  for (const auto& [key, value] : config.items())
    if (key != "architectures") CHECK_MESSAGE(after[key] == value, key);
  CHECK(!fs::exists(step + "/manifest.json"));
}

TEST_CASE("refresh: what cannot be rewritten is refused, and stays as it is") {
  const TempDir scratch;
  const std::string run = older_run(scratch), first = run + "/step_00000001", second = run + "/step_00000002";
  write_text(second + "/model.safetensors", "damaged");
  const auto damaged = others_in(second, {});
  check_outcome(refresh(scratch, second), Exit::bad_data, "model.safetensors");
  const Outcome got = refresh(scratch, run);
  check_outcome(got, Exit::done, "skipped the checkpoint");
  check_outcome(got, Exit::done, "step_00000001: rewrote");
  CHECK(others_in(second, {}) == damaged);
  write_text(first + "/config.json", "damaged");
  check_outcome(refresh(scratch, run), Exit::bad_data, "config.json");
  check_outcome(refresh(scratch, scratch.file("nowhere")), Exit::no_input, "nowhere: neither config.json");
  check_outcome(refresh(scratch, ""), Exit::usage, "--refresh is empty");
  check_outcome(run_program_inside(scratch, {"transplant", "--refresh", first, "--seed", "3"}), Exit::usage, "--seed");
  check_outcome(run_program_inside(scratch, {"transplant", "--model", first}), Exit::usage, "--out is required");
}

TEST_CASE("refresh: what a kill left half done is completed") {
  const TempDir scratch;
  const std::string step = older_run(scratch) + "/step_00000002", manifest = step + "/manifest.json";
  Json listed = known_json(read_text(manifest));
  listed["files"].erase(lime_file);
  write_text(manifest, json_text(listed));
  check_valid(step);
  write_text(step + "/" + lime_file, modelling_file("lime"));  // after it was written, before it was listed
  check_outcome(refresh(scratch, step), Exit::done, "rewrote " + lime_file);
  CHECK(has(read_text(manifest), lime_file));
  check_valid(step);
}

TEST_CASE("refresh: a kill at any moment leaves a valid directory") {
  const TempDir scratch(memory_or_disk());
  const std::string dir = scratch.file("model");
  CheckpointWriter writer;
  writer.begin(dir);
  write_file_atomically(writer.path("model.safetensors"), "weights");
  write_file_atomically(writer.path("a.py"), "0");
  writer.commit();
  write_text(dir + "/notes.txt", "of a user");
  int incomplete = 0;
  for (int round = 0; round < 60; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      try {
        for (int i = 1;; ++i)
          replace_files(dir, {{"a.py", std::string(static_cast<size_t>(i % 5000), 'a')}, {"config.json", str(i)}});
      } catch (...) {
        ::_exit(100);
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(1500 + 137 * round));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    REQUIRE(WIFSIGNALED(status));
    check_valid(dir);
    incomplete += has(read_text(dir + "/manifest.json"), "config.json") ? 0 : 1;
  }
  CHECK(incomplete > 0);  // some kills came in between
  replace_files(dir, {{"a.py", "the last"}, {"config.json", "{}"}});
  check_valid(dir);
  CHECK(names_in(dir) ==
        std::vector<std::string>{"a.py", "config.json", "manifest.json", "model.safetensors", "notes.txt"});
}

TEST_CASE("refresh: a modelling file that was changed or removed by hand is written anew, and the manifest with it") {
  const TempDir scratch;
  const std::string run = older_run(scratch), step = run + "/step_00000002", file = step + "/" + lime_file;
  REQUIRE(refresh(scratch, run).code == 0);
  const std::string right = read_text(file);
  for (const bool removed : {false, true}) {
    if (removed) fs::remove(file);
    else write_text(file, right + "# mine\n");
    const std::vector<std::string> evaluate = {"evaluate", "--model", step, "--data", "arith:3", "--test-samples", "4"};
    check_outcome(run_program_inside(scratch, evaluate), Exit::bad_data, "build/transplant --refresh");
    check_outcome(refresh(scratch, run), Exit::done, "rewrote " + std::string(lime_file));
    CHECK(read_text(file) == right);
    check_valid(step);
  }
}
