// A run that is saved by some ranks and continued by others is the run of one rank.
#include <set>

#include "engine/io/json.h"
#include "models/disk/checkpoint.h"
#include "models/disk/model_dir.h"
#include "tests/ranks/thread_group.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/program.h"
#include "train/run/inputs.h"
#include "train/run/run.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

TrainPlan options_for(const std::string& model, const std::string& dtype, int64_t accumulate) {
  TrainPlan plan;
  plan.config = tiny_with(model);
  plan.config.hidden_size = 32, plan.config.intermediate_size = 48;  // so large that every rank has a slice
  plan.batch = 1, plan.accumulate = accumulate, plan.steps = 100, plan.warmup = 2, plan.lr = 0.01;
  plan.dtype = dtype, plan.sum = "tree";
  plan.bucket_bytes = 70000;  // several buckets
  return plan;
}

// A directory in `run` for every two steps.
std::string step_dir(const Scratch& run, int64_t step) { return run.file(str("step_0000000", step)); }

// `ranks` ranks continue `from`, or begin, and save after so many steps of the run.
void continue_and_save(TrainPlan plan, int ranks, const std::string& from, int64_t until, const std::string& to) {
  const Counting data(10);
  on_ranks(ranks, [&](const std::shared_ptr<ProcessGroup>& group) {
    Trainer trainer(plan, data, from, group);
    while (trainer.steps_done() < until) trainer.step();
    trainer.save(to, Tokenizer());
  });
}

// A checkpoint's weights and moments, as one rank has them in its files.
std::string state_of(const TrainPlan& plan, const std::string& checkpoint) {
  const Scratch scratch;
  const std::string copy = scratch.file("copy");
  continue_and_save(plan, 1, checkpoint, 0, copy);
  return read_text(copy + "/model.safetensors") + read_text(copy + "/optimizer.safetensors");
}

// Saves and continues by so many ranks in turn, two steps each; compares with one rank that never stopped.
void check_chain(const TrainPlan& plan, const std::vector<int>& ranks) {
  const Scratch whole, chain;
  const int64_t steps = 2 * std::ssize(ranks);
  const Counting data(10);
  Trainer uninterrupted(plan, data);
  for (int64_t step = 2; step <= steps; step += 2) {
    uninterrupted.step(), uninterrupted.step();
    uninterrupted.save(step_dir(whole, step), Tokenizer());
    const int now = ranks[static_cast<size_t>(step / 2 - 1)];
    CAPTURES(step, now);
    continue_and_save(plan, now, step == 2 ? "" : step_dir(chain, step - 2), step, step_dir(chain, step));
    std::string why;
    CHECK_MESSAGE(is_valid_checkpoint(step_dir(chain, step), &why), why);
    CHECK(state_of(plan, step_dir(chain, step)) == state_of(plan, step_dir(whole, step)));
    CHECK(fs::exists(step_dir(chain, step) + "/optimizer.safetensors") == (now == 1));
  }
}

json read(const std::string& path) { return known_json(read_text(path)); }

// Four ranks' checkpoint, to be spoiled.
struct Saved {
  Scratch run;
  TrainPlan plan = options_for("lime", "fp32", 4);
  std::string dir = run.file("step_00000001"), index_path = dir + "/optimizer.index.json";
  json index, good;  // good: as it was saved
  std::string name;  // of a row that is in several files

  Saved() {
    continue_and_save(plan, 4, "", 1, dir);
    index = good = read(index_path);
    for (const auto& [row, parts] : index["parameters"].items())
      if (parts.size() > 1 && parts[0][0] != parts[1][0]) name = row;
    REQUIRE(!name.empty());
  }
  json& parts() { return index["parameters"][name]; }
  std::string file(size_t part) { return parts()[part][0]; }
  // Any number of ranks must refuse the index with these words; then it is good again.
  void check_refused(const std::vector<std::string>& words) {
    write_text(index_path, json_text(index));
    for (const int ranks : {1, 2, 4}) {
      CAPTURE(ranks);
      check_fails(Exit::bad_data, words, [&] { continue_and_save(plan, ranks, dir, 0, run.file("other")); });
      CHECK(!fs::exists(run.file("other")));
    }
    index = good;
  }
};

std::string words_of(const json& part) { return str("[", part[1], ":", part[2], "]"); }

}  // namespace

TEST_CASE("elastic: 1 -> 2 -> 4 -> 1 ranks and one that never stops have the same bits") {
  for (const char* model : {"llama", "mudd", "hyper:rate=2"})
    for (const char* dtype : {"fp32", "bf16"}) {
      CAPTURES(model, dtype);
      check_chain(options_for(model, dtype, 8), {1, 2, 4, 1});
    }
  check_chain(options_for("lime", "bf16", 12), {3, 1, 3});
}

TEST_CASE("elastic: with Muon, and with NorMuon's moments of rows, too") {
  for (const char* optimizer : {"muon", "normuon"})
    for (const char* dtype : {"fp32", "bf16"}) {
      CAPTURES(optimizer, dtype);
      TrainPlan plan = options_for("mhc", dtype, 8);
      plan.optimizer = optimizer;
      plan.muon.lr = 0.02, plan.muon.normalize_rows = plan.optimizer == "normuon";
      check_chain(plan, {1, 2, 4, 1});
    }
}

TEST_CASE("elastic: a row's moments lie in several files, and each is there once") {
  Saved saved;
  std::map<std::string, int64_t> elements;
  for (int rank = 0; rank < 4; ++rank) {
    const SafetensorsFile file(str(saved.dir, "/optimizer-0000", rank, "-of-00004.safetensors"));
    for (const TensorInfo& info : file.tensors()) elements[info.name.substr(0, info.name.find('['))] += info.numel();
  }
  ParameterTable params;
  declare_model(params, saved.plan.config);
  CHECK(elements.size() == 2 * params.rows().size());
  for (const Parameter& row : params.rows()) {
    CHECK(elements["m." + row.name] == row.shape.numel());
    CHECK(elements["v." + row.name] == row.shape.numel());
  }
  CHECK(read(saved.dir + "/train_state.json")["world_size"] == 4);
}

TEST_CASE("elastic: an index with a hole, an overlap or nonsense is refused by tensor, range and file") {
  Saved saved;
  const json first = saved.parts()[0], second = saved.parts()[1];
  saved.parts().erase(1);
  saved.check_refused({saved.name, words_of(second), "no file", saved.file(0)});
  saved.parts().erase(0);
  saved.check_refused({saved.name, words_of(first), "no file", "none"});
  saved.parts()[1][1] = 1;
  saved.check_refused({saved.name, str("[1:", first[2], "]"), "two files", saved.file(0), saved.file(1)});
  saved.parts().push_back(first);
  saved.check_refused({saved.name, "two files", saved.file(0)});
  saved.parts().back()[2] = int64_t{1} << 40;
  saved.check_refused({saved.name, "1099511627776", saved.file(saved.parts().size() - 1)});
  for (const json& part :
       {R"(["../x", 0, 1])"_json, R"(["x", -1, 1])"_json, R"(["x", 0, 1.5])"_json, R"([0, 0, 1])"_json,
        R"(["x", 0])"_json, R"("x")"_json, R"({"file": "x"})"_json, R"(null)"_json}) {
    saved.parts()[0] = part;
    saved.check_refused({saved.name, "is not [file, begin, end]"});
  }
  saved.index["parameters"].erase(saved.name);
  saved.check_refused({saved.name, "no file"});
  saved.index["parameters"]["thesis"] = json::array();
  saved.check_refused({"thesis", "not part of the model"});
  saved.index = {{"parameters", 7}};
  saved.check_refused({"optimizer.index.json", "\"parameters\""});
}

TEST_CASE("elastic: a shard that is missing, cut short, or holds other tensors is refused by tensor, range and file") {
  Saved saved;
  const std::string path = saved.dir + "/" + saved.file(1), contents = read_text(path);
  const std::string tensor = "m." + saved.name + words_of(saved.parts()[1]);
  const SafetensorsFile file(path);
  // The same file, with so many elements of `tensor`; none: without it.
  const auto rewrite = [&](int64_t elements) {
    std::deque<std::vector<float>> numbers;
    std::vector<TensorToWrite> tensors;
    for (const TensorInfo& info : file.tensors()) {
      file.read_f32(info, numbers.emplace_back(static_cast<size_t>(info.numel())).data());
      const int64_t n = info.name == tensor ? elements : info.numel();
      if (n > 0) tensors.push_back({info.name, "F32", {n}, numbers.back().data()});
    }
    write_safetensors(path, tensors);
  };
  rewrite(file.find(tensor)->numel() - 1);
  saved.check_refused({path, tensor, "does not fit"});
  rewrite(0);
  saved.check_refused({path, tensor, "is missing"});
  write_text(path, contents.substr(0, contents.size() - 4));
  saved.check_refused({path, "truncated"});
  fs::remove(path);
  saved.check_refused({path, "is missing", "elements ["});
  write_text(path, contents);
  CHECK(state_of(saved.plan, saved.dir).size() > 0);
}

TEST_CASE(
    "elastic: a rank that cannot write, or a job that may not publish, leaves the old checkpoint and nothing else") {
  const Scratch run;
  const TrainPlan plan = options_for("lime", "bf16", 4);
  const Counting data(10);
  const std::string old = step_dir(run, 1);
  continue_and_save(plan, 4, "", 1, old);
  const std::string before = read_text(old + "/manifest.json");
  const auto save = [&](int who, const std::string& to) {
    on_ranks(4, [&](const std::shared_ptr<ProcessGroup>& group) {
      Trainer trainer(plan, data, old, group);
      trainer.step();
      const bool failing = group->world.rank == who;
      const auto may_publish = [&] {
        if (failing) fail(Exit::io, "another job's");
      };
      trainer.save(failing && who > 0 ? run.file("none/step") : to, Tokenizer(), may_publish);
    });
  };
  for (const int who : {0, 1, 3})
    for (const std::string& to : {old, step_dir(run, 2)}) {
      CAPTURES(who, to);
      check_fails(Exit::io, {who == 0 ? "another job's" : run.file("none")}, [&] { save(who, to); });
      CHECK(newest_valid_checkpoint(run.path) == old);
      CHECK(read_text(old + "/manifest.json") == before);
      CHECK(std::distance(fs::directory_iterator(run.path), {}) == 1);  // no temporary either
    }
  save(-1, old);  // and then replaces it
  CHECK(newest_valid_checkpoint(run.path) == old);
  CHECK(read(old + "/train_state.json")["step"] == 2);
}

TEST_CASE("elastic: ranks that read other weights from their disks are told apart before the first step") {
  const Scratch runs[2];
  const TrainPlan plan = options_for("lime", "fp32", 4);
  for (const Scratch& run : runs) continue_and_save(plan, 1, "", 1, step_dir(run, 1));
  const std::string path = step_dir(runs[1], 1) + "/model.safetensors";
  std::string bytes = read_text(path);
  bytes[bytes.size() - 2] = static_cast<char>(bytes[bytes.size() - 2] ^ 1);  // of the last number
  write_text(path, bytes);
  const Counting data(10);
  const auto resume = [&](int64_t check_replicas) {
    on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
      TrainPlan own = plan;
      own.check_replicas = check_replicas;
      Trainer(own, data, step_dir(runs[group->world.rank], 1), group);
    });
  };
  check_fails(Exit::internal, {"after step 1 the weights of rank 1 are not those of rank 0"}, [&] { resume(1000); });
  resume(0);
}

TEST_CASE("elastic: weights above the limit of a file are Hugging Face's shards, written in turns") {
  const Scratch run;
  TrainPlan plan = options_for("lime", "fp32", 4);
  continue_and_save(plan, 2, "", 1, step_dir(run, 1));
  plan.shard_bytes = 1500;
  continue_and_save(plan, 2, step_dir(run, 1), 1, step_dir(run, 2));
  const std::string dir = step_dir(run, 2);
  CHECK(!fs::exists(dir + "/model.safetensors"));
  const json index = read(dir + "/model.safetensors.index.json");
  std::set<std::string> files;
  int64_t bytes = 0;
  for (const auto& [tensor, name] : index["weight_map"].items()) files.insert(name);
  CHECK(files.size() > 2);
  for (const std::string& name : files) {
    const SafetensorsFile file(dir + "/" + name);
    int64_t own = 0;
    for (const TensorInfo& info : file.tensors()) {
      CHECK(index["weight_map"][info.name] == name);
      own += 4 * info.numel();
    }
    CHECK((own <= 1500 || file.tensors().size() == 1));
    bytes += own;
  }
  CHECK(index["metadata"]["total_size"] == bytes);
  CHECK(is_valid_checkpoint(dir, nullptr));
  CHECK(state_of(plan, dir) == state_of(plan, step_dir(run, 1)));
}

TEST_CASE("elastic: an older checkpoint is of one rank and --sum running; another number of ranks is said") {
  const Scratch run;
  const Counting data(10);
  TrainPlan plan = options_for("llama", "fp32", 4);
  plan.sum = "running";
  const std::string dir = step_dir(run, 1), path = dir + "/train_state.json";
  continue_and_save(plan, 1, "", 1, dir);
  const json now = read(path);
  json old = now;
  CHECK(old.erase("world_size") == 1);
  CHECK(old["trajectory"].erase("sum") == 1);
  write_text(path, json_text(old));
  CHECK(Trainer(plan, data, dir).changes().empty());
  CHECK(Trainer(plan, data).changes().empty());
  on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    const std::string said = Trainer(plan, data, dir, group).changes().at(0);
    CHECK(said.starts_with("resumed by 2 ranks, saved by 1"));
    CHECK(has(said, "last digits"));
  });
  TrainPlan tree = plan;
  tree.sum = "tree";
  check_fails(Exit::usage, {"--sum", "running", "tree"}, [&] { Trainer(tree, data, dir); });
  json wrong = now;
  for (const json& value : {json("two"), json(-2), json(1.5)}) {
    wrong["world_size"] = value;
    write_text(path, json_text(wrong));
    check_fails(Exit::bad_data, {path, "world_size"}, [&] { Trainer(plan, data, dir); });
  }
}

TEST_CASE("elastic: ranks continue a program's run, and programs read what they saved") {
  const Scratch scratch;
  const std::string run = scratch.file("run"), fourth = run + "/step_00000004";
  const std::vector<std::string> flags = split_words(
      "--data arith:3 --train-samples 40 --test-samples 8 --width 16 --ffn 24 --layers 2 --heads 2 --batch 2 "
      "--accumulate 4 --steps 4 --save-every 2 --eval-samples 4 --answer-samples 0");
  check_outcome(train(scratch, joined(flags, split_words("--out " + run))), Exit::done, "step 4/4");
  const std::string tokenizer = read_text(fourth + "/tokenizer.json");
  fs::remove_all(fourth);
  Settings settings;
  settings.config.arch = "llama";
  take_run_settings("--resume", run, settings);
  settings.out = run, settings.resume = true;
  const auto go_on = [&](std::shared_ptr<ProcessGroup> group) {
    check_run_dir(settings, group->world);
    const auto [plan, data] = open_inputs(settings);
    const RunDir dir = claim_run_dir(plan, group);
    Trainer trainer(plan, *data.train, find_checkpoint(plan, dir), group);
    CHECK(trainer.steps_done() == 2);
    trainer.step(), trainer.step();
    dir.check_present();
    trainer.save(fourth, data.tokenizer, [&] { dir.check_mine(); });
    group->finish();
  };
  on_ranks(4, go_on);
  std::string why;
  CHECK_MESSAGE(is_valid_checkpoint(fourth, &why), why);
  CHECK(newest_valid_checkpoint(run) == fourth);
  CHECK(read_text(fourth + "/tokenizer.json") == tokenizer);
  check_outcome(run_program_inside(scratch, split_words("evaluate --model " + run +
                                                        " --data arith:3 --train-samples 40 "
                                                        "--test-samples 8 --answers 1")),
                Exit::done, "perplexity");
  check_outcome(run_program_inside(scratch, {"generate", "--model", run, "--prompt", "1 + 2 =", "--max-new", "3"}),
                Exit::done, "");
  check_outcome(train(scratch, {"--resume", "--out", run, "--steps", "5"}), Exit::done,
                "resumed by 1 rank, saved by 4");
  CHECK(fs::exists(run + "/step_00000005/optimizer.safetensors"));

  // The newest one is damaged: rank 0 sets it aside, and all continue the one before it.
  write_text(run + "/step_00000005/optimizer.safetensors", "x");
  on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    RunDir dir(run, group->world);
    dir.mark(group, 0);
    CHECK(find_checkpoint(settings, dir) == fourth);
  });
  CHECK(fs::exists(run + "/damaged_step_00000005"));
}

TEST_CASE("run directory: all ranks must find this job's number in it, and a later job's ends the right to save") {
  const Scratch scratch;
  const std::string shared = scratch.file("run"), local = scratch.file("local");
  fs::create_directory(local);
  const auto claim = [&](int ranks, const std::string& other) {
    on_ranks(ranks, [&](const std::shared_ptr<ProcessGroup>& group) {
      RunDir dir(group->world.rank == 1 ? other : shared, group->world);
      dir.mark(group, 0);
      dir.check_present();
      if (group->world.leads()) dir.check_mine();
    });
  };
  claim(3, shared);
  check_fails(Exit::no_input, {local, "rank 1", "file system"}, [&] { claim(3, local); });
  check_fails(Exit::no_input, {scratch.file("none"), "rank 1"}, [&] { claim(2, scratch.file("none")); });
  fs::copy(shared + "/.job", local + "/.job");  // of an older job
  check_fails(Exit::no_input, {local, "rank 1"}, [&] { claim(2, local); });
  on_ranks(2, [&](const std::shared_ptr<ProcessGroup>& group) {
    RunDir cut_off(shared, group->world);
    cut_off.mark(group, 0);
    group->barrier("every rank has found it");
    if (!group->world.leads()) return;
    const std::string mine = read_text(shared + "/.job");
    write_text(shared + "/.job", "another job's");
    check_fails(Exit::io, {shared, "another job"}, [&] { cut_off.check_mine(); });
    write_text(shared + "/.job", mine);
    cut_off.check_mine();
    RunDir(local).mark(one_rank_group());
    CHECK(!fs::exists(local + "/.job"));
    fs::remove(shared + "/.job");
    check_fails(Exit::io, {shared, "another job"}, [&] { cut_off.check_mine(); });
  });
}

TEST_CASE("run directory: what ranks find each other by does not make it one, nor is it removed") {
  const Scratch scratch;
  TrainPlan plan;
  plan.out = scratch.file("run");
  fs::create_directory(plan.out);
  for (const char* name : {".job", ".meet", ".tmp-.job-1", ".tmp-.meet-1"}) write_text(plan.out + "/" + name, "x");
  fs::rename(plan.out + "/.tmp-.job-1", temporary_sibling(plan.out + "/.job"));
  fs::rename(plan.out + "/.tmp-.meet-1", temporary_sibling(plan.out + "/.meet"));
  check_run_dir(plan);
  remove_leftovers_in(plan.out);
  CHECK(std::distance(fs::directory_iterator(plan.out), {}) == 2);
  write_text(plan.out + "/thesis", "x");
  check_fails(Exit::usage, {"not empty"}, [&] { check_run_dir(plan); });
}
