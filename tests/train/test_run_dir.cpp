// Run directories: what --resume takes over, what it refuses, and that no line of their history is lost.
#include "engine/io/json.h"
#include "train/run/run_dir.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "data/shards.h"
#include "models/disk/checkpoint.h"
#include "tests/support/check.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"
#include "train/run/metrics.h"

using namespace crossply;
using namespace crossply::test;
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

std::string metrics_line(int64_t step) {
  return str("{\"loss\":2.5,\"lr\":0.1,\"seconds\":", step, ".5,\"step\":", step, "}\n");
}

}  // namespace

TEST_CASE("run directory: only the last line of metrics.jsonl can be cut; a file with any other bad line is kept") {
  const Scratch scratch;
  const std::string path = scratch.file("metrics.jsonl"), one = metrics_line(1), two = metrics_line(2);
  const std::string three = metrics_line(3);
  struct Case {
    std::string before;
    int64_t step;
    std::string after;
    bool kept;
  };
  for (const Case& c : std::vector<Case>{
           {one + two + three, 3, one + two + three, false},
           {one + two + three, 2, one + two, false},  // later steps are done again
           {one + two + three.substr(0, 9), 2, one + two, false},
           {one + two + three.substr(0, three.size() - 1), 3, one + two + three, false},  // only the newline is missing
           {one + two + std::string(20, '\0'), 2, one + two, false},
           {one + two + "oops\n", 2, one + two, true},
           {one + "\n" + three, 3, one + three, true},
           {one + "oops\n" + three, 3, one + three, true},
           {one + two.substr(0, 9) + "\n" + three, 3, one + three, true},
           {one + "{\"step\":2}\n" + three, 3, one + three, true},
           {one + "{\"step\":2,\"loss\":\"low\"}\n" + three, 3, one + three, true},
           {one + "{\"step\":2,\"loss\":1,\"test_loss\":\"low\"}\n" + three, 3, one + three, true},
           {one + "{\"step\":2.5,\"loss\":1}\n" + three, 3, one + three, true},
           {one + "{\"step\":18446744073709551615,\"loss\":1}\n" + two, 2, one + two, true},
           {one + "{\"step\":2,\"loss\":null}\n", 2, one, true},
           {one + two + one, 2, one + two, true},
           {one + std::string(90000, '[') + "\n" + two, 2, one + two, true},
           {one + two, 0, "", true}}) {
    CAPTURE(c.before);
    write_text(path, c.before);
    const std::string aside = free_kept_name(path);
    const Metrics metrics(path, c.step);
    CHECK(read_text(path) == c.after);
    CHECK(metrics.curves().step.size() == static_cast<size_t>(std::count(c.after.begin(), c.after.end(), '\n')));
    CHECK(metrics.notes().size() == (c.kept ? 1 : 0));
    CHECK(fs::exists(aside) == c.kept);
    if (c.kept) CHECK(read_text(aside) == c.before);
  }
  write_text(path, one + "oops\n" + two);
  CHECK(Metrics(path, 2).notes()[0].find("line 2 ") != std::string::npos);
  write_text(path, one);
  CHECK(Metrics(path, 1).notes().empty());
  CHECK(Metrics(path, 3).notes()[0].find("lacks 2 of the 3 steps") != std::string::npos);
  fs::remove(path);
  CHECK(Metrics(path, 3).notes()[0].find("lacks 3 of the 3 steps") != std::string::npos);
}

TEST_CASE("run directory: metrics.jsonl that is a pipe is refused, and one that is removed is noticed") {
  const Scratch scratch;
  const std::string path = scratch.file("metrics.jsonl");
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  CHECK(error_of([&] { Metrics(path, 3); }).code == Exit::bad_data);
  fs::remove(path);
  Metrics metrics(path, 0);
  metrics.write({{"step", 1}, {"loss", 2.5}});
  CHECK(read_text(path) == "{\"loss\":2.5,\"step\":1}\n");
  fs::remove(path);
  CHECK(error_of([&] { metrics.write({{"step", 2}, {"loss", 2.5}}); }).code == Exit::io);
  CHECK(tokens_per_second(100, 0) == 0);
  CHECK(tokens_per_second(100, 0.5) == 200);
}

TEST_CASE("run directory: flags.json gives every setting back, and no value that a flag could not have") {
  const Scratch scratch;
  Settings o;
  o.config.arch = "lime";
  o.config.vocab_size = 19;
  o.config.options["window"] = "2";
  o.config.rope_theta = 12345.678;
  o.config.check(Exit::usage, "test");
  o.preset = "arith";
  o.data.spec = "arith:4", o.data.val_spec = "v*.bin", o.data.tokenizer = "t.json";
  o.data.train_samples = 7, o.data.test_samples = 8, o.data.seq_len = 9;
  o.data.shuffle = "documents", o.data.documents = "before", o.data.eot = 3, o.data.test_part = "first_half";
  o.init = "somewhere";
  o.teacher = "elsewhere", o.kd.alpha = 0.7, o.kd.tau = 3, o.kd_reduction = "element";
  o.steps = 11, o.batch = 12, o.accumulate = 13, o.warmup = 14;
  o.lr = 0.1, o.router_lr = 1.0 / 3, o.freeze_routers = true, o.lr_floor = 0.25, o.schedule = "linear";
  o.adamw.weight_decay = 0.3, o.adamw.beta1 = 0.8, o.adamw.beta2 = 0.99, o.adamw.clip = 2;
  o.adamw.eps = 1e-10, o.adamw.cautious = true, o.decay_schedule = "cosine", o.z_loss = 1e-4;
  o.transfer = {"completep", 64, 3, 8, 0.75};
  o.optimizer = "muon", o.muon.lr = 0.02, o.muon.scale = "spectral", o.muon.momentum = 0.9, o.muon.nesterov = false;
  o.muon.momentum_warmup = 3, o.muon.polynomial = "polar_express", o.muon.steps = 4;
  o.decay_all = true, o.seed = 18446744073709551615u;
  o.device = "reference", o.dtype = "bf16", o.matmul = "bf16x3", o.plan = "distinct", o.sum = "tree";
  o.eval_every = 3, o.eval_samples = 4, o.eval_rule = "spread", o.answer_samples = 5, o.save_every = 6, o.keep = 7;
  o.tensorboard = o.csv = o.log_ranks = true, o.peer_timeout = 20, o.check_replicas = 9, o.save_at = "1e6";
  const json saved = all_settings(o);
  auto write = [&](const json& settings) { write_text(scratch.file("flags.json"), json_text(settings)); };
  auto read = [&](const std::string& arch = "lime") {
    Settings other;
    other.config.arch = arch;
    take_run_settings("--resume", scratch.path, other);
    return all_settings(other);
  };
  Settings none;
  take_run_settings("--resume", scratch.path, none);
  none.resume = true, none.out = scratch.path;
  CHECK(continued_run(none) == "");
  const json defaults = all_settings(none);
  for (const auto& [key, value] : defaults.items()) CHECK_MESSAGE(saved[key] != value, key);
  write(saved);
  CHECK(read() == saved);
  CHECK(continued_run(none) == scratch.path);
  none.resume = false, none.branch.run = scratch.path;
  CHECK(continued_run(none) == scratch.path);
  json older = saved;
  older["schedule"] = "cosine1";
  write(older);
  CHECK(read()["schedule"] == "cosine_to_floor");
  CHECK(older.erase("sum") == 1);
  write(older);
  CHECK(read()["sum"] == "running");
  CHECK(older.erase("tokenizer") == 1);
  write(older);
  CHECK(read()["tokenizer"] == "");
  CHECK(older.erase("eval_rule") == 1);
  write(older);
  CHECK(read()["eval_rule"] == "first");
  write(saved);
  CHECK(error_of([&] { read("llama"); }).code == Exit::usage);
  const json spoilt_values = R"({"steps": [-5, 0, "many", 1e30, 18446744073709551615], "batch": [0, 2.5, 2199023255552],
      "keep": [-1], "seq": [[]], "lr": ["fast", -1], "lr_floor": [2], "beta2": [1], "seed": [-1], "data": [7],
      "decay_all": [1], "schedule": ["flat"], "dtype": ["fp17"], "matmul": ["fp9"], "sum": ["all", 1],
      "eval_rule": ["last"], "optimizer": ["sgd"], "test_part": ["half"], "muon_scale": ["big"], "muon_steps": [101],
      "decay_schedule": ["up"], "transfer": ["all"], "base_width": [-1], "depth_alpha": [0.4, 2],
      "z_loss": [-1e-4, "x"], "teacher": [5], "kd_alpha": [1.5, "x"], "kd_tau": [0, -1, 1e-30, 1e30],
      "kd_reduction": ["sum"], "config": [3, {}]})"_json;
  for (const auto& [key, values] : spoilt_values.items())
    for (const json& value : values) {
      json spoilt = saved;
      spoilt[key] = value;
      write(spoilt);
      CAPTURE(json_text(value));
      check_fails(Exit::bad_data, {key}, [&] { read(); });
    }
}

TEST_CASE("run directory: what a process of compare is told of this call, and what ranks may have their own of") {
  Settings settings;
  CHECK(call_settings(settings) == json::object());
  settings.out = "runs/a", settings.resume = settings.profile = settings.other_gpu = true, settings.lr = 7;
  const json call = call_settings(settings);
  CHECK(call == R"({"out": "runs/a", "resume": true, "profile": true, "other_gpu": true})"_json);
  Settings other;
  take_call_settings(call, "test", other);
  CHECK((other.out == "runs/a" && other.resume && other.profile && other.other_gpu && other.lr == Settings().lr));

  const json of_ranks = settings_of_all_ranks(settings);
  CHECK((of_ranks["lr"] == 7 && of_ranks["resume"] == true && of_ranks["check_replicas"] == 1000));
  for (const char* own : {"out", "peer_timeout", "log_ranks"}) CHECK(!of_ranks.contains(own));
  settings.resume = false;
  CHECK(settings_of_all_ranks(settings).at("resume") == false);  // and not missing, where another rank has it
}

// As the program of November 2026 wrote them, before the flags were rows of a table.
TEST_CASE(
    "run directory: flags.json and the settings in a checkpoint of an older program are read as they were meant") {
  const json older = R"({"accumulate": 3, "answer_samples": 0, "batch": 2, "beta1": 0.8, "beta2": 0.97, "clip": 2.0,
      "csv": true, "data": "arith:3", "decay_all": true, "device": "cpu", "dtype": "bf16", "eval_every": 5,
      "eval_rule": "spread", "eval_samples": 4, "init": "", "keep": 3, "lr": 0.002, "lr_floor": 0.1, "matmul": "fp32",
      "plan": "distinct", "preset": "arith", "router_lr": 0.01, "save_every": 6, "schedule": "linear", "seed": 43,
      "seq": 25, "steps": 12, "sum": "tree", "teacher": "", "tensorboard": true, "test_samples": 8, "tokenizer": "",
      "train_samples": 40, "val_data": "", "warmup": 1, "weight_decay": 0.2,
      "config": {"crossply": {"arch": "lime", "qk_norm": false, "routing": "last", "window": 1}, "head_dim": 8,
      "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2,
      "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "vocab_size": 21,
      "tie_word_embeddings": true, "model_type": "crossply_lime", "max_position_embeddings": 2048}})"_json;
  Settings s;
  take_settings(older, "flags.json", s);
  const json now = all_settings(s);
  for (const auto& [key, value] : older.items())
    if (key != "config") CHECK_MESSAGE(now[key] == value, key);
  CHECK((s.check_replicas == 1000 && s.peer_timeout == 30 && !s.log_ranks));  // which it did not keep
  CHECK((s.config.arch == "lime" && s.config.options.at("window") == "1"));
  json checkpoint = trajectory(s);  // has the same of these as older ones, and what they did not have
  const std::vector<const char*> newer = {"optimizer", "adam_eps", "cautious_decay", "decay_schedule", "shuffle",
                                          "documents", "eot",      "test_part",      "freeze_routers", "transfer",
                                          "z_loss"};
  CHECK(checkpoint.size() == 26 + newer.size());
  for (const char* key : newer) checkpoint.erase(key);
  for (const auto& [key, value] : checkpoint.items()) CHECK_MESSAGE(older[key] == value, key);
  refuse_other_settings(checkpoint, s, "RUN");
  for (const char* key : {"matmul", "teacher", "tokenizer"}) checkpoint.erase(key);  // still older
  refuse_other_settings(checkpoint, s, "RUN");
  checkpoint["clip"] = 1;
  check_fails(Exit::usage, {"RUN", "--clip 1", "2.0"}, [&] { refuse_other_settings(checkpoint, s, "RUN"); });
}

TEST_CASE("run directory: --resume --out alone continues, and more steps change the schedule from there on") {
  const Scratch scratch;
  const std::string run = scratch.file("run");
  const std::vector<std::string> more = split_words("--steps 12 --save-every 4 --keep 9 --warmup 2 --lr 0.01");
  check_outcome(train(scratch, tiny_run(run, more)), Exit::done, "step 12/12");
  const std::string weights = read_text(run + "/step_00000012/model.safetensors");
  const std::string metrics = timeless(run + "/metrics.jsonl"), flags = read_text(run + "/flags.json");
  fs::remove_all(run + "/step_00000012");
  fs::remove_all(run + "/step_00000008");
  check_outcome(train(scratch, {"--resume", "--out", run}), Exit::done, "resumed after step 4");
  CHECK(read_text(run + "/step_00000012/model.safetensors") == weights);
  CHECK(timeless(run + "/metrics.jsonl") == metrics);
  CHECK(read_text(run + "/flags.json") == flags);

  // What may not change is refused by name; what may, is taken.
  for (const auto& [flag, value] : std::map<std::string, std::string>{
           {"--lr", "0.02"}, {"--seed", "7"}, {"--batch", "8"}, {"--steps", "11"}, {"--test-samples", "30"}})
    check_outcome(train(scratch, {"--resume", "--out", run, flag, value}), Exit::usage, flag);
  check_outcome(train(scratch, {"--resume", "--out", run, "--layers", "3"}), Exit::usage, "num_hidden_layers");
  check_outcome(train(scratch, {"--resume", "--out", run}, "lime"), Exit::usage, "train_llama");
  check_outcome(train(scratch, {"--resume", "--out", run, "--keep", "1", "--check-replicas", "7"}), Exit::done,
                "resumed after step 12");
  check_outcome(train(scratch, {"--resume", "--out", run}), Exit::done, "resumed after step 12");
  CHECK(known_json(read_text(run + "/flags.json"))["keep"] == 1);
  CHECK(known_json(read_text(run + "/flags.json"))["check_replicas"] == 7);

  const Outcome grown = train(scratch, {"--resume", "--out", run, "--steps", "20"});
  check_outcome(grown, Exit::done, "--steps grows from 12 to 20: from here on the cosine schedule is that of 20 steps");
  const Schedule schedule{ScheduleKind::cosine, 2, 20, 0};
  std::ifstream lines(run + "/metrics.jsonl");
  int64_t step = 0;
  for (std::string line; std::getline(lines, line); ++step)
    if (step >= 12) CHECK(known_json(line)["lr"] == 0.01 * schedule.at(step));
  CHECK(step == 20);
  check_outcome(train(scratch, {"--resume", "--out", run}), Exit::done, "resumed after step 20");
}

TEST_CASE("run directory: without checkpoints a resumed run has the same flags, and the old metrics are kept") {
  const Scratch scratch;
  const std::string run = scratch.file("run");
  check_outcome(train(scratch, tiny_run(run, {"--steps", "5"})), Exit::done, "step 5/5");
  const std::string metrics = read_text(run + "/metrics.jsonl"), curve = read_text(run + "/curve.svg");
  for (const char* step : {"/step_00000004", "/step_00000005"}) fs::remove_all(run + step);
  check_outcome(train(scratch, tiny_run(run, {"--steps", "5", "--resume", "--lr", "0.5"})), Exit::usage, "--lr");
  check_outcome(train(scratch, tiny_run(run, {"--steps", "5", "--resume", "--ffn", "40"})), Exit::usage,
                "intermediate");
  CHECK(read_text(run + "/metrics.jsonl") == metrics);
  check_outcome(train(scratch, {"--resume", "--out", run}), Exit::done, "of 5 earlier steps are kept as");
  CHECK(read_text(run + "/metrics.jsonl.kept-1") == metrics);
  CHECK(read_text(run + "/curve.svg.kept-1") == curve);
  CHECK(timeless(run + "/metrics.jsonl") == timeless(run + "/metrics.jsonl.kept-1"));
}

TEST_CASE("run directory: --resume takes over nothing but a run") {
  const Scratch scratch;
  const std::string model = scratch.file("model"), foreign = scratch.file("foreign");
  check_outcome(train(scratch, tiny_run(model, {"--steps", "0"})), Exit::done, "initialised");
  check_outcome(train(scratch, tiny_run(model, {"--steps", "4", "--resume"})), Exit::usage, "is a model directory");
  fs::create_directory(foreign);
  write_text(foreign + "/metrics.jsonl", "mine\n");
  check_outcome(train(scratch, tiny_run(foreign, {"--steps", "4", "--resume"})), Exit::usage, "no flags.json");
  CHECK(read_text(foreign + "/metrics.jsonl") == "mine\n");
  CHECK(!fs::exists(foreign + "/step_00000004"));
  check_outcome(train(scratch, {"--resume", "--out", scratch.file("new")}), Exit::usage, "there is no run in");
  fs::create_directory_symlink("loop", scratch.file("loop"));  // that it cannot be looked at does not make it a run
  check_outcome(train(scratch, tiny_run(scratch.file("loop"), {"--steps", "4"})), Exit::io, "loop");
  // Killed before it could write its flags.
  fs::create_directory(scratch.file("new"));
  write_text(scratch.file(str("new/.tmp-flags.json-", ::getpid())), "{");
  check_outcome(train(scratch, tiny_run(scratch.file("new"), {"--steps", "4", "--resume"})), Exit::done, "at step 0");
  CHECK(!fs::exists(scratch.file(str("new/.tmp-flags.json-", ::getpid()))));
}

TEST_CASE("run directory: a checkpoint that cannot be read ends --resume; nothing is renamed, nothing is skipped") {
  const Scratch scratch;
  const std::string run = scratch.file("run"), newest = run + "/step_00000005/model.safetensors";
  check_outcome(train(scratch, tiny_run(run, {"--steps", "5"})), Exit::done, "step 5/5");
  fs::rename(newest, scratch.file("moved"));
  fs::create_symlink("model.safetensors", newest);  // a loop: opening it is a failure of the system
  const std::string metrics = read_text(run + "/metrics.jsonl");
  check_outcome(train(scratch, {"--resume", "--out", run}), Exit::io, newest);
  CHECK(fs::exists(run + "/step_00000005"));
  CHECK(read_text(run + "/metrics.jsonl") == metrics);
  CHECK(error_of([&] { resolve_model_dir(run); }).code == Exit::io);
  fs::remove(newest);  // gone: that is damage
  check_outcome(train(scratch, {"--resume", "--out", run}), Exit::done, "resumed after step 4");
  CHECK(fs::exists(run + "/damaged_step_00000005"));
}

TEST_CASE("run directory: the --init directory is needed at the start only") {
  const Scratch scratch;
  const std::string run = scratch.file("run"), model = scratch.file("model");
  std::vector<uint32_t> tokens;
  for (uint32_t i = 0; i < 500; ++i) tokens.push_back(i * 7 % 19);
  write_shard(scratch.file("data.bin"), tokens, ShardFormat::uint16);
  check_outcome(train(scratch, tiny_run(model, {"--steps", "0"})), Exit::done, "initialised");
  const std::string tokenizer = read_text(model + "/tokenizer.json");
  write_text(model + "/tokenizer_config.json", R"({"its": "own"})");
  fs::remove(model + "/manifest.json");  // which lists another one
  check_outcome(train(scratch, {"--data", scratch.file("data.bin"), "--seq", "8", "--init", model, "--steps", "4",
                                "--batch", "2", "--out", run}),
                Exit::done, "step 4/4");
  fs::rename(model, scratch.file("moved"));
  check_outcome(train(scratch, {"--resume", "--out", run, "--steps", "6"}), Exit::done, "resumed after step 4");
  CHECK(read_text(run + "/step_00000006/tokenizer.json") == tokenizer);
  CHECK(read_text(run + "/step_00000006/tokenizer_config.json") == R"({"its": "own"})");
}

TEST_CASE("run directory: one that is removed, moved or replaced is noticed") {
  const Scratch scratch;
  const RunDir run(scratch.file("a/run"));
  run.check_present();
  CHECK(error_of([&] { RunDir(scratch.file("a/run")); }).code == Exit::usage);  // held
  fs::rename(scratch.file("a/run"), scratch.file("b"));
  CHECK(error_of([&] { run.check_present(); }).code == Exit::io);
  fs::create_directory(scratch.file("a/run"));
  CHECK(error_of([&] { run.check_present(); }).code == Exit::io);
  fs::remove_all(scratch.file("a/run"));
  fs::rename(scratch.file("b"), scratch.file("a/run"));
  run.check_present();
  fs::remove_all(scratch.file("a"));
  CHECK(error_of([&] { run.check_present(); }).code == Exit::io);
}

TEST_CASE("run directory: data is named so that it is found from any directory") {
  const std::string here = fs::current_path().string() + "/";
  CHECK(absolute_data("text:a*.txt") == "text:" + here + "a*.txt");
  CHECK(absolute_data("uint16:a/*.bin") == "uint16:" + here + "a/*.bin");
  CHECK(absolute_data("nowhere/shards") == here + "nowhere/shards");  // a directory
  CHECK(absolute_data("./nowhere//shards") == here + "nowhere/shards");
  CHECK(absolute_data("a/../b.bin") == here + "a/../b.bin");
  for (const char* same : {"arith:4", "prosqa", "", "x", "text:/a", "/a/b.bin"}) CHECK(absolute_data(same) == same);
}

TEST_CASE("run directory: data that moved is taken where it holds the same, and is found from any directory") {
  const Scratch scratch;
  const std::string run = scratch.file("run"), text = scratch.file("text");
  std::string contents;
  for (int i = 0; i < 900; ++i) contents += str(i * i % 977, " ");
  write_text(text, contents);
  const std::vector<std::string> sizes =
      split_words("--width 16 --ffn 24 --layers 1 --heads 2 --batch 2 --seq 16 --save-every 2 --out " + run);
  const fs::path here = fs::current_path();
  fs::current_path(scratch.path);
  const Outcome started = train(scratch, joined(split_words("--data text:text --steps 4"), sizes));
  fs::current_path(here);
  check_outcome(started, Exit::done, "step 4: test loss");
  check_outcome(train(scratch, {"--resume", "--out", run, "--steps", "6"}), Exit::done, "resumed after step 4");
  CHECK(known_json(read_text(run + "/flags.json"))["data"] == "text:" + text);

  fs::rename(text, scratch.file("moved"));
  check_outcome(train(scratch, {"--resume", "--out", run}), Exit::no_input, "say with --data where it is now");
  const std::string moved = "text:" + scratch.file("moved");
  check_outcome(train(scratch, {"--resume", "--out", run, "--steps", "8", "--data", moved}), Exit::done,
                "resumed after step 6");
  check_outcome(train(scratch, {"--resume", "--out", run}), Exit::done, "resumed after step 8, the last one");
  contents[700] ^= 1;
  write_text(scratch.file("other"), contents);
  check_outcome(train(scratch, {"--resume", "--out", run, "--data", "text:" + scratch.file("other")}), Exit::usage,
                "only other files with the same contents");

  // As older runs have it, and without a checkpoint: only the same place.
  json settings = known_json(read_text(run + "/flags.json"));
  settings["data"] = "text:moved";
  write_text(run + "/flags.json", json_text(settings));
  for (const fs::directory_entry& entry : fs::directory_iterator(run))
    if (entry.is_directory()) fs::remove_all(entry.path());
  write_text(text, read_text(scratch.file("moved")));
  fs::current_path(scratch.path);
  const Outcome elsewhere = train(scratch, {"--resume", "--out", run, "--data", "text:" + text});
  const Outcome same = train(scratch, {"--resume", "--out", run, "--data", moved});
  fs::current_path(here);
  check_outcome(elsewhere, Exit::usage, "--data");
  check_outcome(same, Exit::done, "at step 0");
}

TEST_CASE("run directory: a run says what of a large vocabulary is of no use, and what --init started from") {
  const Scratch scratch;
  const std::string model = scratch.file("model"), note = "--vocab 21 would save 15,664 parameters";
  CHECK(train(scratch, tiny_run(scratch.file("small"), {"--steps", "2"})).output.find("note:") == std::string::npos);
  check_outcome(train(scratch, tiny_run(scratch.file("large"), {"--steps", "2", "--vocab", "1000"})), Exit::done, note);
  check_outcome(train(scratch, tiny_run(model, {"--steps", "0"})), Exit::done, "initialised");
  check_outcome(
      train(scratch, {"--data", "arith:3", "--train-samples", "100", "--test-samples", "20", "--init", model,
                      "--layers", "1", "--steps", "2", "--answer-samples", "0", "--out", scratch.file("next")}),
      Exit::done, "note: starting from the weights of " + model + ", a llama, the first 1 of its 2 blocks");
}
