// The probe: what it keeps is what the model computes, in every architecture; and the dump, which writes that.
#include "eval/inside/probe.h"

#include <cmath>
#include <set>

#include "eval/inside/dump.h"
#include "tests/support/cases.h"
#include "tests/support/inside.h"
#include "tests/support/tiny_bpe.h"

using namespace crossply;
using namespace crossply::test;

namespace {

constexpr int64_t T = TinyModel::T;

// "hidden" of "hidden.3".
std::string kind_of(const std::string& name) { return name.substr(0, name.find('.')); }

std::set<std::string> kinds_of(const Probe& probe) {
  std::set<std::string> kinds;
  for (const std::string& name : probe.names()) kinds.insert(kind_of(name));
  return kinds;
}

// What is marked and what attention reads and writes on a tape of the model, looked at, that is planned in this way.
std::map<std::string, std::vector<float>> values_of_tape(TinyModel& model, PlanMode mode, std::vector<float>* losses) {
  Tape tape(Dtype::f32);
  tape.enable_probes();
  const Graph graph = record_model(tape, model.params, model.config, 1, T);
  tape.plan(mode), tape.allocate(*model.device);
  load_batch(*model.device, graph, model.tokens.data(), model.targets.data());
  std::map<std::string, std::vector<float>> found;
  tape.watch([&](size_t n, bool) {
    const Node& node = *tape.nodes()[n];
    for (const auto& [name, value] : tape.marks())
      if (std::ranges::count(node.out, value) > 0) found[name] = model.values<float>(value->tensor);
    if (dynamic_cast<const ops::AttentionNode*>(&node) == nullptr || node.name.starts_with("pass.")) return;
    std::string layer = node.name.substr(1, node.name.find('.') - 1);
    if (found.contains("query." + layer)) layer += ".2";
    const std::pair<const char*, Value*> values[] = {
        {"query.", node.in[0]}, {"key.", node.in[1]}, {"value.", node.in[2]}, {"attended.", node.out[0]}};
    for (const auto& [what, value] : values) found[what + layer] = model.values<float>(value->tensor);
  });
  tape.forward(Step{});
  *losses = model.values<float>(graph.losses->tensor);
  return found;
}

bool same_numbers(const std::vector<double>& a, const std::vector<float>& b) {
  return std::ranges::equal(a, b, [](double x, float y) { return x == static_cast<double>(y); });
}

// A tiny model of bytes in a directory, with another number in the named row where one is given.
void make_bytes_model(const std::string& dir, const std::string& arch, const std::string& row = "", float number = 0) {
  Config config = tiny_config(arch, 2);
  config.vocab_size = 256, config.max_position_embeddings = 64;
  config.check(Exit::usage, "test");
  TinyModel model(config);
  if (!row.empty()) model.fill(row, [&](int64_t) { return static_cast<double>(number); });
  save_model(dir, model.params, config);
}

std::vector<float> tensor_of(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo* info = file.find(name);
  REQUIRE_MESSAGE(info != nullptr, name);
  std::vector<float> numbers(static_cast<size_t>(info->numel()));
  file.read_f32(*info, numbers.data());
  return numbers;
}

}  // namespace

TEST_CASE("probe: every architecture has the names of all models, and those of its own") {
  const std::map<std::string, std::set<std::string>> own = {{"lime", {}},
                                                            {"hyper", {"attn_mixing", "mlp_mixing"}},
                                                            {"vertical", {"mixed"}},
                                                            {"denseformer", {"mixed"}},
                                                            {"mudd", {"mixed", "route"}},
                                                            {"lime_dynamic", {"route"}},
                                                            {"satformer", {"gate"}}};
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    TinyModel model(c.config);
    const Probe probe(*model.device, model.params, model.config, 1, T, "tiny");
    const std::set<std::string> kinds = kinds_of(probe);
    for (const char* kind : {"hidden", "own_query", "own_key", "own_value", "query", "key", "value", "attended"})
      CHECK_MESSAGE(kinds.contains(kind), kind);
    if (const auto found = own.find(c.config.arch); found != own.end())
      for (const std::string& kind : found->second) CHECK_MESSAGE(kinds.contains(kind), kind);
    for (int64_t i = 0; i < applications_of(c.config).count(); ++i) {
      const int64_t H = c.config.num_attention_heads;
      const Shape query = probe.shape(str("query.", i)), key = probe.shape(str("key.", i));
      CHECK(query == probe.shape(str("attended.", i)));
      CHECK((query[1] == T && query[2] == H && key[1] == T));
      CHECK(H % key[2] == 0);  // of other layers too, where heads look there
    }
  }
}

TEST_CASE("probe: with documents a token sees its own alone") {
  TinyModel model(tiny_config("lime", 2));
  const std::vector<int32_t> tokens = {3, 6, 1, 4, 5};  // two documents, after the token 1
  Probe both(*model.device, model.params, model.config, 1, T, "tiny", {1}),
      second(*model.device, model.params, model.config, 1, 2, "tiny");
  both.keep("hidden.4"), second.keep("hidden.4");
  std::vector<double> P(static_cast<size_t>(T * T));
  both.watch_attention([&](size_t, const AttentionInputs& inputs) {
    inputs.probabilities(0, 0, T, P.data());
    for (size_t t = 0; t < 5; ++t)
      for (size_t j = 0; j < 5; ++j) CHECK((P[5 * t + j] > 0) == (j <= t && (t < 3 || j >= 3)));
    CHECK(std::abs(P[5 * 4 + 3] + P[5 * 4 + 4] - 1) < 1e-12);
  });
  both.run(tokens.data()), second.run(tokens.data() + 3);
  const size_t C = static_cast<size_t>(model.config.hidden_size);
  for (size_t i = 0; i < 2 * C; ++i) CHECK(std::abs(both.at("hidden.4")[3 * C + i] - second.at("hidden.4")[i]) < 1e-5);
}

TEST_CASE("probe: what it keeps is on a tape where every value has its own memory, and where the dead are poisoned") {
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    TinyModel model(c.config);
    Probe probe(*model.device, model.params, model.config, 1, T, "tiny");
    for (const std::string& name : probe.names()) probe.keep(name);
    probe.run(model.tokens.data(), model.targets.data());
    for (const PlanMode mode : {PlanMode::distinct, PlanMode::poison}) {
      std::vector<float> losses;
      const auto values = values_of_tape(model, mode, &losses);
      CHECK(same_numbers(probe.losses(), losses));
      CHECK(values.size() == probe.names().size());
      for (const auto& [name, numbers] : values) CHECK_MESSAGE(same_numbers(probe.at(name), numbers), name);
    }
  }
}

// A change is seen where it is made, and is gone when it is taken back. What only those who look in compute, as the sum
// of hyper-connections' streams, and what was read before it was marked reach no loss.
TEST_CASE("probe: every kind of value that is changed reaches the loss, and changed back, leaves no trace") {
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    TinyModel model(c.config);
    Probe probe(*model.device, model.params, model.config, 1, T, "tiny");
    probe.run(model.tokens.data(), model.targets.data());
    const std::vector<double> plain = probe.losses();
    std::map<std::string, int> reached;
    for (const std::string& name : probe.names()) {
      probe.change(name, [](std::vector<double>& numbers) {
        for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = 1.5 * numbers[i] + (i % 3 == 0 ? 0.25 : 0);
      });
      probe.run(model.tokens.data(), model.targets.data());
      reached[kind_of(name)] += probe.losses() != plain;
      probe.change(name, nullptr);
    }
    for (const auto& [kind, times] : reached)
      CHECK_MESSAGE((times > 0 || kind == "exit_loss" || kind == "exit_weight"), kind);  // made beside the losses
    probe.run(model.tokens.data(), model.targets.data());
    CHECK(probe.losses() == plain);
  }
}

TEST_CASE("probe: in double precision, and on a device of its own loops, it sees the same") {
  for (const Architecture& architecture : architectures()) {
    if (architecture.name.starts_with("draft")) continue;
    CAPTURE(architecture.name);
    const Config config = tiny_config(architecture.name, 2);
    TinyModel fast(config), exact(config, "reference", PlanMode::reuse, Dtype::f64);
    Probe one(*fast.device, fast.params, config, 1, T, "fast"),
        other(*exact.device, exact.params, config, 1, T, "exact");
    REQUIRE(one.names() == other.names());
    for (const std::string& name : one.names()) one.keep(name), other.keep(name);
    one.run(fast.tokens.data(), fast.targets.data());
    other.run(fast.tokens.data(), fast.targets.data());
    for (const std::string& name : one.names()) {
      const std::vector<double>&a = one.at(name), &b = other.at(name);
      REQUIRE(a.size() == b.size());
      double largest = 0;
      for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]) / (1 + std::abs(b[i])));
      CHECK_MESSAGE(largest < 1e-5, name << ": " << largest);
    }
  }
}

TEST_CASE("probe: a tape that nobody looks at is the same but for what only is looked at") {
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    TinyModel model(c.config);
    Tape plain(Dtype::f32), seen(Dtype::f32);
    seen.enable_probes();
    record_model(plain, model.params, model.config, 2, T);
    record_model(seen, model.params, model.config, 2, T);
    std::vector<std::string> names, others;
    for (const auto& node : plain.nodes()) names.push_back(str(node->op(), " ", node->name));
    for (const auto& node : seen.nodes())
      if (!has(node->name, "streams.seen")) others.push_back(str(node->op(), " ", node->name));
    CHECK(names == others);
    const bool streams =  // the owner of the stream comes first in a name
        std::set<std::string>{"hyper", "mhc", "gated_streams"}.contains(parts_of(c.config.arch)[0]) ||
        has(c.name, "lanes_from");
    if (!streams) CHECK(plain.nodes().size() == seen.nodes().size());
    plain.differentiate(), seen.differentiate();
    plain.plan(PlanMode::reuse), seen.plan(PlanMode::reuse);
    if (!streams) CHECK(plain.arena_bytes() == seen.arena_bytes());
  }
}

TEST_CASE("probe: a second attention of a layer has names of its own") {
  TinyModel model(tiny_config("draft_two_attentions", 2));
  const Probe probe(*model.device, model.params, model.config, 1, T, "tiny");
  for (const char* kind : {"query", "key", "value", "attended"}) {
    CHECK(!probe.has(str(kind, ".0.2")));
    for (const char* layer : {".1", ".1.2", ".3.2"}) CHECK_MESSAGE(probe.has(kind + std::string(layer)), kind << layer);
  }
}

TEST_CASE("probe: names in short") {
  CHECK(names_in_short({"hidden.0", "query.0", "query.0.2", "hidden.1", "query.1", "query.1.2", "hidden.2",
                        "gate.1"}) == "hidden.0-2 query.0-1 query.0-1.2 gate.1");
  CHECK(names_in_short({"gate.2", "gate.5", "gate.6", "gate.9"}) == "gate.2,5-6,9");
  CHECK(names_in_short({}).empty());
}

TEST_CASE("dump: all values of a model, as the probe sees them, from weights in bf16 too") {
  const TempDir scratch;
  make_bytes_model(scratch.file("model"), "satformer");
  {  // the same in bf16
    std::filesystem::copy(scratch.file("model"), scratch.file("in_bf16"));
    const SafetensorsFile file(scratch.file("model") + "/model.safetensors");
    std::map<std::string, std::vector<uint16_t>> numbers;
    std::vector<TensorToWrite> tensors;
    for (const TensorInfo& info : file.tensors()) {
      for (const float x : tensor_of(file, info.name)) {
        uint32_t bits = 0;
        std::memcpy(&bits, &x, 4);
        numbers[info.name].push_back(static_cast<uint16_t>(bits >> 16));
      }
      tensors.push_back({info.name, "BF16", info.shape, numbers[info.name].data()});
    }
    write_safetensors(scratch.file("in_bf16") + "/model.safetensors", tensors);
  }
  const std::string data = text_file(scratch, letters(300)), out = scratch.file("out");
  for (const char* name : {"model", "in_bf16"}) {
    CAPTURE(name);
    const Outcome got =
        run_program_inside(scratch, {"analyze", "--model", scratch.file(name), "--data", data, "--dump", "*",
                                     "--sequences", "3", "--length", "7", "--seed", "4", "--out", out});
    check_outcome(got, Exit::done, "wrote " + out + "/values.safetensors");
    const SafetensorsFile file(out + "/values.safetensors");
    CHECK(file.metadata().at("crossply") == "analyze");
    for (const auto& [key, said] : {std::pair{"windows", "3"}, {"length", "7"}, {"seed", "4"}})
      CHECK(file.metadata().at(key) == said);
    std::vector<int64_t> tokens(21), targets(21);
    file.read_raw(*file.find("tokens"), "I64", tokens.data());
    file.read_raw(*file.find("targets"), "I64", targets.data());
    LoadedModel model(scratch.file(name), "cpu", false);
    Probe probe(model, 1, 7);
    for (const std::string& value : probe.names()) probe.keep(value);
    for (size_t w = 0; w < 3; ++w) {
      const std::vector<int32_t> ids(tokens.begin() + 7 * static_cast<int64_t>(w),
                                     tokens.begin() + 7 * static_cast<int64_t>(w + 1));
      probe.run(ids.data());
      for (const std::string& value : probe.names()) {
        const std::vector<float> all = tensor_of(file, value);
        const size_t size = all.size() / 3;
        CHECK_MESSAGE(same_numbers(probe.at(value), {all.begin() + static_cast<int64_t>(w * size),
                                                     all.begin() + static_cast<int64_t>((w + 1) * size)}),
                      value);
      }
    }
    CHECK(file.find("attention.3")->shape == std::vector<int64_t>{3, 4, 7, 7});
  }
}

TEST_CASE("dump: several models, names that are not there, and files that are somebody else's") {
  const TempDir scratch;
  for (const char* arch : {"llama", "lime"}) make_bytes_model(scratch.file(arch), arch);
  write_text(scratch.file("text"), letters(300));
  const std::string out = scratch.file("out");
  const auto dump = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"analyze", "--data", "text:" + scratch.file("text"), "--sequences", "2", "--length",
                                 "5", "--out", out});
    return run_program_inside(scratch, words);
  };
  const std::string one = scratch.file("llama"), two = scratch.file("lime");
  check_outcome(dump({"--model", one, two, "--dump", "hidden.*", "hidden.2"}), Exit::done, "values.2.safetensors, 8");
  CHECK(names_in(out) == std::vector<std::string>{"values.1.safetensors", "values.2.safetensors"});
  check_outcome(dump({"--model", one, two, "--dump", "hidden.*"}), Exit::done, "values.2.safetensors");  // again
  check_outcome(dump({"--model", one, "--dump", "gate.*"}), Exit::usage, "has no such value; it has: hidden.0-4 ");
  check_outcome(dump({"--model", one, one, "--dump", "hidden.*"}), Exit::usage, "is there twice");
  CHECK(names_in(out).size() == 2);
  for (const char* contents : {"mine", ""}) {
    write_text(out + "/values.safetensors", contents);
    check_outcome(dump({"--model", one, "--dump", "hidden.*"}), Exit::usage, "was not written by this program");
    CHECK(out_text(scratch, "values.safetensors") == contents);
  }
  std::filesystem::remove(out + "/values.safetensors");
  std::filesystem::copy(one + "/model.safetensors", out + "/values.safetensors");  // safetensors, but not ours
  check_outcome(dump({"--model", one, "--dump", "hidden.*"}), Exit::usage, "was not written by this program");
  std::filesystem::remove(out + "/values.safetensors");
  std::filesystem::create_directory(out + "/values.2.safetensors.d");
  std::filesystem::create_directory(out + "/values.safetensors");
  check_outcome(dump({"--model", one, "--dump", "hidden.*"}), Exit::usage, "was not written by this program");
}

TEST_CASE("dump: more than the memory holds is refused before it starts") {
  const TempDir scratch;
  make_bytes_model(scratch.file("model"), "llama");
  write_text(scratch.file("text"), letters(300));
  const Outcome got = run_program_inside(
      scratch, {"analyze", "--model", scratch.file("model"), "--data", "text:" + scratch.file("text"), "--dump",
                "attention.*", "--sequences", "1000000000", "--length", "60", "--out", scratch.file("out")});
  check_outcome(got, Exit::usage, "of values are more than the free memory");
  CHECK(names_in(scratch.file("out")).empty());
}

TEST_CASE("analyze: weights that are not finite or too large, short texts: one line, and nothing written") {
  const TempDir scratch;
  const float nan = NAN;
  make_bytes_model(scratch.file("nan"), "llama", "model.layers.3.mlp.down_proj.weight", nan);
  make_bytes_model(scratch.file("huge"), "llama", "model.layers.3.mlp.down_proj.weight", 3e38F);
  make_bytes_model(scratch.file("head"), "llama", "model.norm.weight", 3e38F);
  make_bytes_model(scratch.file("good"), "llama");
  write_text(scratch.file("text"), letters(300));
  write_text(scratch.file("one"), "x");
  write_text(scratch.file("empty"), "");
  const std::string out = scratch.file("out");
  const auto expect = [&](const std::string& model, const std::string& text, Exit code, const std::string& says,
                          const std::vector<std::string>& more) {
    std::vector<std::string> words = {
        "analyze", "--model", scratch.file(model), "--data", "text:" + scratch.file(text), "--sequences", "2",
        "--out",   out};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome got = run_program_inside(scratch, words);
    check_outcome(got, code, says);
    CHECK_MESSAGE(names_in(out).empty(), more.back());
  };
  for (const std::vector<std::string>& what : {std::vector<std::string>{"--dump", "query.0"},
                                               {"--what", "attention"},
                                               {"--what", "sinks"},
                                               {"--what", "maps"}}) {
    expect("nan", "text", Exit::bad_data, "model.layers.3.mlp.down_proj.weight", what);  // as of every program
    expect("huge", "text", Exit::not_finite, "hidden.4 is not finite", what);
    expect("good", "one", Exit::bad_data, "one", what);
    expect("good", "empty", Exit::bad_data, "empty", what);
  }
  expect("good", "text", Exit::usage, "--length 65", {"--length", "65", "--dump", "query.0"});
}
