// What decides a GPU's last digits: the table of algorithms, and that a checkpoint carries it to another process.
#include "engine/io/json.h"
#include "kernels/cuda/arithmetic.h"

#include <cstring>
#include <limits>

#include "engine/io/sha256.h"
#include "kernels/block/matmul.h"
#include "kernels/cuda/hopper.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/program.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;
using nlohmann::json;

namespace {

TrainPlan tiny_options(const std::string& device, const std::string& dtype = "fp32") {
  TrainPlan plan;
  plan.config.arch = "lime";
  plan.config.vocab_size = 7, plan.config.hidden_size = 16, plan.config.intermediate_size = 24;
  plan.config.num_hidden_layers = 2, plan.config.num_attention_heads = 2;
  plan.config.check(Exit::usage, "test");
  plan.steps = 4, plan.batch = 2;
  plan.device = device, plan.dtype = dtype;
  return plan;
}

// A checkpoint of one step in a directory, and its train_state.json as it was written.
struct Checkpoint {
  TempDir scratch;
  std::string dir = scratch.file("step_00000001"), path = dir + "/train_state.json";
  json state;
  explicit Checkpoint(const TrainPlan& plan) {
    const Counting data;  // the trainer reads it in every step
    Trainer trainer(plan, data);
    trainer.step();
    trainer.save(dir, Tokenizer());
    state = known_json(read_text(path));
  }
  void write(const json& other) const { write_text(path, json_text(other)); }
  void write_device(const json& record) const {
    json other = state;
    other["device"] = record;
    write(other);
  }
};

// The weights when the run is done.
std::vector<float> finish(Trainer& trainer, int64_t steps) {
  while (trainer.steps_done() < steps) trainer.step();
  const Tensor values = trainer.params().values();
  std::vector<float> host(static_cast<size_t>(values.numel()));
  trainer.device().copy_out(host.data(), values.data, values.bytes());
  return host;
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The arguments of the smallest run, into a directory.
std::vector<std::string> of_one_step(const std::string& out) {
  return {"--data",   "arith:3", "--train-samples", "8", "--test-samples",   "4", "--width", "8",
          "--ffn",    "8",       "--layers",        "1", "--heads",          "1", "--batch", "1",
          "--steps",  "1",       "--eval-samples",  "1", "--answer-samples", "0", "--out",   out,
          "--device", gpu};
}

// Makes a checkpoint, and its manifest, say that it is another GPU's.
void pretend_other_gpu(const std::string& dir) {
  const std::string name = "train_state.json";
  json state = known_json(read_text(dir + "/" + name)), manifest = known_json(read_text(dir + "/manifest.json"));
  CHECK(state["device"]["choices"].size() > 0);
  state["device"]["versions"]["GPU"] = "a faster one";
  const std::string text = json_text(state);
  Sha256 hash;
  hash.update(text.data(), text.size());
  manifest["files"][name] = {{"bytes", text.size()}, {"sha256", hash.hex()}};
  write_text(dir + "/" + name, text);
  write_text(dir + "/manifest.json", json_text(manifest));
}

// A product on the GPU of a kind that no other test has.
template <class F>
void with_new_product(F&& body) {
  const OnDevice<float> out(poisoned<float>(7 * 3)), inp(random_vector<float>(7 * 5, 1));
  const OnDevice<float> weight(random_vector<float>(3 * 5, 2));
  forget_choices();
  body([&] {
    matmul_forward({view(out.data, {7, 3})}, view(inp.data, {7, 5}), {view(weight.data, {3, 5})},
                   Stream{Backend::cuda});
  });
}

}  // namespace

TEST_CASE("arithmetic: the first algorithm stays unless another is clearly faster, or it cannot run") {
  if (!available(Backend::cuda)) return;
  const float never = std::numeric_limits<float>::infinity();
  // The index of the offer that these times make, each offer's bytes being its index.
  const auto chosen = [](const std::vector<float>& times, size_t count) {
    std::vector<Choice> offers(count);
    for (size_t i = 0; i < count; ++i) offers[i].fill(static_cast<uint8_t>(i));
    return choose(
        "", [&](bool) { return offers; }, [&](const auto&) { return times; })[0];
  };
  CHECK(chosen({1, 0.98f, 1.2f}, 3) == 0);
  CHECK(chosen({1, 0.96f, 0.9f, never}, 4) == 2);
  CHECK(chosen({never, 3, 2}, 3) == 2);
  CHECK(chosen({never, never}, 2) == 0);
  CHECK(chosen({}, 3) == 0);  // there was no memory for trials
}

TEST_CASE("arithmetic: where no algorithm is offered, the second question asks for less") {
  if (!available(Backend::cuda)) return;
  Choice any{};
  any.fill(3);
  std::vector<bool> asked;
  const auto never_timed = [](const auto&) -> std::vector<float> { throw std::logic_error("timed"); };
  const auto ask = [&](bool at_last) {
    return [&, at_last](bool all_wishes) {
      asked.push_back(all_wishes);
      return all_wishes || !at_last ? std::vector<Choice>() : std::vector<Choice>{any};
    };
  };
  CHECK(choose("4 x 5", ask(true), never_timed) == any);
  CHECK(asked == std::vector<bool>{true, false});
  check_fails(Exit::device, {"4 x 5"}, [&] { choose("4 x 5", ask(false), never_timed); });
}

TEST_CASE("arithmetic: the table is the same after a way through text, and nothing else is taken for one") {
  if (!available(Backend::cuda)) return;
  forget_choices();
  ProductKind kind{};
  kind[0] = 5, kind[16] = -7;
  Choice choice{};
  choice.back() = 0xA1;
  keep_choice(kind, choice);
  const auto text = choices_as_text();
  REQUIRE(text.size() == 1);
  const auto [product, digits] = *text.begin();
  CHECK(product == "5 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 -7");
  CHECK(digits.substr(digits.size() - 2) == "a1");
  forget_choices();
  CHECK(find_choice(kind) == nullptr);
  take_choices(text, "there");
  REQUIRE(find_choice(kind) != nullptr);
  CHECK(*find_choice(kind) == choice);
  const std::string half = digits.substr(2), other = "1" + product;
  for (const std::map<std::string, std::string>& damaged :
       std::vector<std::map<std::string, std::string>>{{{"", digits}},
                                                       {{product + " 1", digits}},
                                                       {{product.substr(2), digits}},
                                                       {{product + "x", digits}},
                                                       {{" " + product, digits}},
                                                       {{product, ""}},
                                                       {{product, half}},
                                                       {{product, digits + "00"}},
                                                       {{product, half + "g1"}},
                                                       {{product, half + "A1"}},
                                                       {{other, digits}, {product, "?"}}}) {
    CAPTURE(damaged.begin()->first);
    CAPTURE(damaged.begin()->second);
    check_fails(Exit::bad_data, {"there"}, [&] { take_choices(damaged, "there"); });
    CHECK(choices_as_text() == text);
  }
}

TEST_CASE("arithmetic: a recording takes the algorithms that are chosen, and has no product of a new kind") {
  if (!available(Backend::cuda)) return;
  with_new_product([](auto&& multiply) {
    begin_capture();
    check_fails(Exit::internal, {"new kind"}, multiply);
    abandon_capture();
    multiply();
    CHECK(choices_as_text().size() == 1);
    begin_capture();
    multiply();
    end_capture();
    CHECK(choices_as_text().size() == 1);
  });
}

TEST_CASE("arithmetic: a run on a GPU resumes bit for bit in another process, by what the checkpoint says") {
  if (!available(Backend::cuda)) return;
  const Counting data;
  for (const char* dtype : {"fp32", "bf16"}) {
    CAPTURE(dtype);
    const TrainPlan plan = tiny_options(gpu, dtype);
    const Checkpoint checkpoint(plan);  // after one step
    Trainer whole(plan, data);
    const std::vector<float> want = finish(whole, plan.steps);
    const auto table = choices_as_text();
    CHECK(table.size() > 5);
    // Each of these stands for a new process, which has chosen nothing yet.
    forget_choices();
    Trainer resumed(plan, data, checkpoint.dir);
    CHECK(resumed.changes().empty());
    CHECK(same_bits(finish(resumed, plan.steps), want));
    CHECK(choices_as_text() == table);
  }
}

TEST_CASE("arithmetic: a checkpoint that says nothing of its device is refused on a GPU, but for --other-gpu") {
  if (!available(Backend::cuda)) return;
  const Counting data;
  TrainPlan plan = tiny_options(gpu);
  const Checkpoint checkpoint(plan);  // after one step
  Trainer whole(plan, data);
  const std::vector<float> want = finish(whole, plan.steps);
  json state = checkpoint.state;
  const std::string here = state["device"]["versions"]["GPU"];
  CHECK(state.erase("device") == 1);
  checkpoint.write(state);
  forget_choices();
  check_fails(Exit::device, {checkpoint.path, "GPU was unknown, is " + here, "--other-gpu"},
              [&] { Trainer(plan, data, checkpoint.dir); });
  plan.resume = plan.other_gpu = true;
  Trainer forgetful(plan, data, checkpoint.dir);
  CHECK(forgetful.changes().at(0).find("GPU was unknown") != std::string::npos);
  const std::vector<float> got = finish(forgetful, plan.steps);
  if (emulated) CHECK(!same_bits(got, want));  // on a GPU timing may well end as before
}

TEST_CASE("arithmetic: a checkpoint of another GPU, driver or library is refused, but for --other-gpu") {
  if (!available(Backend::cuda)) return;
  const Counting data;
  TrainPlan plan = tiny_options(gpu);
  const Checkpoint checkpoint(plan);
  json record = checkpoint.state["device"];
  const std::string here = record["versions"]["GPU"];
  record["versions"]["GPU"] = "a faster one", record["versions"]["library"] = "7";
  checkpoint.write_device(record);
  forget_choices();
  check_fails(Exit::device,
              {checkpoint.path, "GPU was a faster one, is " + here, "library was 7, is unknown", "--other-gpu"},
              [&] { Trainer(plan, data, checkpoint.dir); });
  plan.resume = plan.other_gpu = true;
  Trainer trainer(plan, data, checkpoint.dir);
  CHECK(trainer.changes().at(0).find("GPU was a faster one") != std::string::npos);
  CHECK(choices_as_text().empty());  // they mean nothing to another library
  trainer.step();
  trainer.save(checkpoint.dir, Tokenizer());
  plan.other_gpu = false;
  CHECK(Trainer(plan, data, checkpoint.dir).steps_done() == 2);

  check_outcome(train(checkpoint.scratch, {"--data", "arith:3", "--out", checkpoint.scratch.file("x"), "--other-gpu"}),
                Exit::usage, "--other-gpu has no effect without --resume");
}

TEST_CASE("arithmetic: a checkpoint made by sm_90's attention is not continued by sm_80's") {
  if (!available(Backend::cuda)) return;
  const WithHopper use;
  if (!has_hopper()) return;  // another GPU
  const Counting data;
  const TrainPlan plan = tiny_options(gpu);
  const Checkpoint checkpoint(plan);
  Trainer(plan, data, checkpoint.dir);
  ::setenv("CROSSPLY_NO_HOPPER", "1", 1);
  check_fails(Exit::device, {checkpoint.path, "attention was sm_90, is sm_80", "--other-gpu"},
              [&] { Trainer(plan, data, checkpoint.dir); });
  ::unsetenv("CROSSPLY_NO_HOPPER");
}

TEST_CASE("arithmetic: --other-gpu is said in one line of the run") {
  if (!available(Backend::cuda)) return;
  const TempDir scratch;
  const std::string run = scratch.file("run");
  check_outcome(train(scratch, of_one_step(run)), Exit::done, "");
  pretend_other_gpu(run + "/step_00000001");
  check_outcome(train(scratch, {"--resume", "--out", run}), Exit::device, "GPU was a faster one, is ");
  check_outcome(train(scratch, {"--resume", "--other-gpu", "--out", run}), Exit::done,
                "--other-gpu: GPU was a faster one, is ");
}

TEST_CASE("arithmetic: a comparison goes on with another GPU where --other-gpu says so") {
  if (!available(Backend::cuda)) return;
  const TempDir scratch;
  const std::string out = scratch.file("runs"), step = "/step_00000001";
  const auto compare = [&](const std::vector<std::string>& arguments) {
    return run_program_inside(scratch, joined(std::vector<std::string>{"compare"}, arguments));
  };
  check_outcome(compare(joined(std::vector<std::string>{"--arch", "llama,lime"}, of_one_step(out))), Exit::done, "");
  for (const std::string arch : {"/llama", "/lime"}) pretend_other_gpu(out + arch + step);
  check_outcome(compare({"--resume", "--steps", "2", "--out", out}), Exit::device, "GPU was a faster one, is ");
  check_outcome(compare({"--resume", "--steps", "2", "--other-gpu", "--out", out}), Exit::done,
                "lime  --other-gpu: GPU was a faster one, is ");
}

TEST_CASE("arithmetic: what no device has written is bad data") {
  const Counting data;
  const char* parts = R"([null, 3, "x", [], {}, {"versions": {}}, {"choices": {}}, {"versions": 1, "choices": {}},
      {"versions": {"GPU": 1}, "choices": {}}, {"versions": {}, "choices": []}, {"versions": {}, "choices": "00"},
      {"versions": {}, "choices": {"1 2": 7}}])";
  for (const std::string& device : fast_devices()) {
    const TrainPlan plan = tiny_options(device);
    const Checkpoint checkpoint(plan);
    CHECK(checkpoint.state.contains("device") == (device != "cpu"));
    const auto resume = [&] { Trainer(plan, data, checkpoint.dir); };
    for (const json& record : known_json(parts)) {
      CAPTURE(json_text(record));
      checkpoint.write_device(record);
      check_fails(Exit::bad_data, {checkpoint.path}, resume);
    }
    checkpoint.write(checkpoint.state);
    resume();
    if (device == "cpu") continue;
    for (const char* choice : {"", "0", "zz"}) {
      json record = checkpoint.state["device"];
      record["choices"].begin().value() = choice;
      checkpoint.write_device(record);
      check_fails(Exit::bad_data, {checkpoint.path, "hexadecimal"}, resume);
    }
    json record = checkpoint.state["device"];
    record["choices"]["1 2 3"] = record["choices"].begin().value();
    checkpoint.write_device(record);
    check_fails(Exit::bad_data, {checkpoint.path, "1 2 3"}, resume);
  }
}
