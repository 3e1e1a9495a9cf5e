// What one step looks like from outside: --dump-tape's table, and --dump-tensors' file.
#include "train/run/dump_tensors.h"

#include <map>
#include <set>
#include <sstream>

#include "engine/io/safetensors.h"
#include "tests/support/cases.h"
#include "tests/support/program.h"

using namespace crossply;
using namespace crossply::test;

namespace {

Dumped dump(TinyModel& model, const std::vector<std::string>& names, const std::string& path) {
  const Batch batch{TinyModel::B, TinyModel::T, model.tape.dtype(), true, PlanMode::distinct};
  return dump_tensors(names, path, model.params, model.config, batch, model.tokens.data(), model.targets.data());
}

std::vector<double> read(const SafetensorsFile& file, const std::string& name) {
  std::vector<double> numbers(static_cast<size_t>(file.find(name)->numel()));
  file.read_f64(*file.find(name), numbers.data());
  return numbers;
}

// The change of the mean loss with element i of a value, where the value is changed right after the forward of node n,
// and with it the squares of it that the node has taken on the way.
double slope(TinyModel& model, size_t n, const Value& value, size_t i) {
  const auto at = [&](double d) {
    model.tape.watch([&, d](size_t node, bool backward) {
      if (node != n || backward) return;
      double& x = value.tensor.as<double>()[i];
      for (const Value* saved : model.tape.nodes()[n]->saved)
        if (saved->name == value.name + ".squares")
          saved->tensor.as<double>()[i / static_cast<size_t>(value.shape.numel() / saved->shape.numel())] +=
              d * (2 * x + d);
      x += d;
    });
    model.tape.forward(Step{true, 1 / model.scored, 0});
    return sum_losses(*model.device, model.graph) / model.scored;
  };
  // Off by h^4 times a fifth derivative, which is large where a norm follows small values: with 1e-4, Engram's lookups
  // of 0.03 were off by 2e-8, six times what is allowed. Rounding is 1e-11 here.
  constexpr double h = 2.5e-5;
  return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
}

}  // namespace

TEST_CASE("dump tensors: every gradient is the derivative of the loss by the value that the file has, in double") {
  const TempDir scratch;
  for (const Case& c : one_in(3, cases())) {
    CAPTURE(c.name);
    TinyModel model(c.config, "reference", PlanMode::distinct, Dtype::f64);
    const std::string path = scratch.file("all.safetensors");
    const double loss = dump(model, {"*"}, path).loss;
    const std::vector<double> gradients = model.values<double>(model.params.gradients());
    CHECK(loss == model.step());
    CHECK(gradients == model.values<double>(model.params.gradients()));
    const SafetensorsFile file(path);
    for (const Parameter& row : model.params.rows()) {
      CHECK(read(file, row.name) == model.values<double>(row.value));
      if (file.find("d:" + row.name) != nullptr) CHECK(read(file, "d:" + row.name) == model.values<double>(row.grad));
    }
    size_t checked = 0;
    for (size_t n = 0; n < model.tape.nodes().size(); ++n) {
      for (const Value* value : model.tape.nodes()[n]->out) {
        CAPTURE(value->name);
        if (value->grad == nullptr || file.find(value->name) == nullptr || file.find(value->grad->name) == nullptr)
          continue;
        const std::vector<double> x = read(file, value->name), dx = read(file, value->grad->name);
        const size_t i = n * 7 % x.size();
        std::vector<double> seen;
        model.tape.watch([&](size_t node, bool backward) {
          if (node == n && !backward) seen = model.values<double>(value->tensor);
        });
        model.tape.forward(Step{true, 1 / model.scored, 0});
        CHECK(seen == x);
        CHECK(dx[i] == doctest::Approx(slope(model, n, *value, i)).epsilon(1e-6).scale(1e-3));
        ++checked;
      }
    }
    CHECK(checked > 20);
  }
}

TEST_CASE("dump tensors: names, patterns, types, and what is refused") {
  const TempDir scratch;
  TinyModel model(tiny_config("llama"), "cpu", PlanMode::reuse, Dtype::bf16);
  const std::string path = scratch.file("some.safetensors");
  CHECK(dump(model, {"L1.attn.q", "d:L1.attn.q", "tokens", "model.norm.*", "d:*.norm.weight"}, path).tensors == 5);
  std::set<std::string> found;
  const SafetensorsFile file(path);
  for (const TensorInfo& info : file.tensors()) found.insert(info.str());
  CHECK(found == std::set<std::string>{"\"L1.attn.q\" BF16 [2, 5, 4, 2]", "\"d:L1.attn.q\" BF16 [2, 5, 4, 2]",
                                       "\"tokens\" I32 [2, 5]", "\"model.norm.weight\" F32 [8]",
                                       "\"d:model.norm.weight\" F32 [8]"});
  std::vector<int32_t> tokens(10);
  file.read_raw(*file.find("tokens"), "I32", tokens.data());
  CHECK(tokens == model.tokens);
  const auto refused = [&](const std::string& name, const std::string& says) {
    check_fails(Exit::usage, {says}, [&] { dump(model, {"tokens", name}, scratch.file("refused.safetensors")); });
  };
  refused("L1.atn.q", "near it are L1.attn.q ");
  refused("L9.*", "named L9.*");
  refused("L1.attn.out", "on the way to L1.attn.residual");  // the product whose op adds the stream on the way
  refused("L1.attn.ou*", "on the way to L1.attn.residual");
  refused("d:L1.attn.out", "no op writes the gradient of L1.attn.out by itself; near it are d:L1.attn");
  CHECK(!path_exists(scratch.file("refused.safetensors")));
}

TEST_CASE("dump tensors: a run that is looked at stays as it is, file by file") {
  const TempDir scratch;
  write_text(scratch.file("text"), std::string(400, 'a') + std::string(400, 'b'));
  const std::string out = scratch.file("run");
  check_outcome(train(scratch,
                      split_words("--seq 8 --steps 3 --batch 4 --width 8 --layers 2 --heads 2 --ffn 12 "
                                  "--eval-samples 2 --out " +
                                  out + " --data text:" + scratch.file("text")),
                      "lime"),
                Exit::done, "step 3");
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(out))
      if (entry.is_regular_file()) files[entry.path().string()] = read_text(entry.path().string());
    files.erase(out + "/tensors.safetensors");
    return files;
  };
  const auto before = contents();
  check_outcome(train(scratch, {"--resume", "--out", out, "--dump-tensors", "tokens", "d:model.norm.weight"}, "lime"),
                Exit::done, "wrote 2 tensors");
  CHECK(SafetensorsFile(out + "/tensors.safetensors").tensors().size() == 2);
  CHECK(contents() == before);
  for (int i = 0; i < 2; ++i)  // without a run, and again
    check_outcome(train(scratch,
                        {"--data", "text:" + scratch.file("text"), "--seq", "8", "--width", "8", "--layers", "2",
                         "--heads", "2", "--out", scratch.file("tap"), "--dump-tensors", "tokens"},
                        "lime"),
                  Exit::done, "wrote 1 tensor");
}

TEST_CASE("dump tape: lines fit 120 columns, for every architecture") {
  for (const Architecture& architecture : architectures()) {
    TinyModel model(tiny_config(architecture.name));
    std::istringstream lines(model.tape.dump());
    for (std::string line; std::getline(lines, line);) CHECK_MESSAGE(line.size() <= 120, line);
  }
}

TEST_CASE("dump tape: forward, backward in its order, and totals") {
  const std::string text = TinyModel(tiny_config("llama")).tape.dump();
  size_t at = 0;
  for (const char* part : {"FORWARD",
                           "   0  embedding       embed ",
                           "(2, 5, 8) ",
                           "<- model.embed_tokens.weight tokens\n",
                           "linear          L0.attn.q ",
                           "L0.attn.k ",
                           "L0.attn.v ",  // one product
                           "rope            L0.attn.q_rope ",
                           "in L0.attn.q\n",
                           "L0.attn.lse ",
                           "saved\n",
                           "linear          L0.attn.residual ",
                           "<- L0.attn model.layers.0.self_attn.o_proj.weight embed\n",
                           "BACKWARD",
                           "cross_entropy = d:norm ",
                           "in the forward\n",
                           "= d:L3.mlp.swiglu ",
                           "+ d:model.layers.3.mlp.down_proj.weight (8, 6) ",
                           "<- d:L3.mlp.residual L3.mlp.swiglu\n",
                           "in L3.mlp.gate\n",
                           "+ d:L3.attn.residual ",
                           "   0  embedding     + d:model.embed_tokens.weight ",
                           "TOTALS\n",
                           " ops; forward ",
                           "activations ",
                           "gradients ",
                           "alive at the peak"}) {
    CAPTURE(part);
    const size_t next = text.find(part, at);
    CHECK(next != std::string::npos);
    if (next != std::string::npos) at = next;
  }
}

TEST_CASE("dump tensors: what a kill left is no obstacle, and a file that somebody else wrote stays") {
  const TempDir scratch;
  write_text(scratch.file("text"), std::string(400, 'a') + std::string(400, 'b'));
  const std::string out = scratch.file("tap"), file = out + "/tensors.safetensors",
                    left = out + "/.tmp-tensors.safetensors-1073741824";  // a process of this number there never is
  const std::vector<std::string> flags =
      split_words("--seq 8 --width 8 --layers 1 --heads 1 --steps 2 --batch 2 --eval-samples 2 --data text:" +
                  scratch.file("text") + " --out " + out);
  std::vector<std::string> look = flags;
  look.insert(look.end(), {"--dump-tensors", "tokens"});
  std::filesystem::create_directory(out);
  write_text(left, "half");
  check_outcome(train(scratch, look), Exit::done, "wrote 1 tensor");
  CHECK(!path_exists(left));
  check_outcome(train(scratch, look), Exit::done, "wrote 1 tensor");  // ours is replaced
  const float mine = 3;
  for (int other = 0; other < 2; ++other) {
    if (other == 0) write_safetensors(file, {{"mine", "F32", {1}, &mine}}, {{"crossply", "gradients"}});
    else write_text(file, "notes");
    const std::string before = read_text(file);
    check_outcome(train(scratch, look), Exit::usage, "was not written by this program");
    CHECK(read_text(file) == before);
  }
  std::filesystem::remove(file);
  write_text(left, "half");
  check_outcome(train(scratch, flags), Exit::done, "step 2/2");  // a run starts there, too
  CHECK(!path_exists(left));
}
