// A head in the files of a model whose config.json ties it to the embedding: one with other values is used, one with
// the embedding's values is the embedding, on every path that reads weights.

#include "engine/io/file.h"
#include "engine/io/json.h"
#include "models/disk/config_json.h"
#include "models/disk/model_dir.h"
#include "tests/support/data_check.h"
#include "tests/support/program.h"
#include "tests/support/tiny.h"

using namespace crossply;
using namespace crossply::test;
using Json = nlohmann::json;

namespace {

constexpr const char* note = "lm_head.weight differs from the embedding, so it is used";

// A directory with an untied model, whose config.json says that it is tied, and a text to compute a loss of.
struct Saved {
  TempDir dir;
  std::string model = dir.file("model"), text = dir.file("text");
  double loss = 0;  // what the untied model gives

  explicit Saved(Config config, bool sharded = false) {
    config.vocab_size = 256;
    config.tie_word_embeddings = false;
    TinyModel untied(config, "cpu");
    untied.params.initialise(3);
    std::filesystem::create_directory(model);
    write(untied, sharded);
    write_text(text, std::string(50, 'x') + "yz, and so on; " + std::string(30, 'w'));
    loss = evaluated(model, "");
    say_tied();
  }

  void write(TinyModel& untied, bool sharded) {
    save_config(model + "/config.json", untied.config);
    std::vector<NamedTensor> values = values_of(untied.params, untied.config);
    if (!sharded) return save_tensors(model + "/model.safetensors", untied.params, values);
    const std::vector<NamedTensor> last(values.end() - 1, values.end()), others(values.begin(), values.end() - 1);
    save_tensors(model + "/a.safetensors", untied.params, others);
    save_tensors(model + "/b.safetensors", untied.params, last);
    Json index = {{"weight_map", Json::object()}};
    for (const NamedTensor& tensor : others) index["weight_map"][tensor.name] = "a.safetensors";
    index["weight_map"][last[0].name] = "b.safetensors";
    write_text(model + "/model.safetensors.index.json", json_text(index));
  }
  void say_tied() const {
    Json config = known_json(read_text(model + "/config.json"));
    config["tie_word_embeddings"] = true;
    write_text(model + "/config.json", json_text(config));
  }
  // The loss that evaluate gives; it must say so, or with "" say nothing.
  double evaluated(const std::string& from, const std::string& says) {
    const Outcome got =
        run_program_inside(dir, split_words("evaluate --model " + from + " --data text:" + text + " --seq 8"));
    check_outcome(got, Exit::done, says);
    if (says.empty()) CHECK_MESSAGE(!has(got.output, "lm_head"), got.output);
    const size_t at = got.output.find("loss ");
    REQUIRE_MESSAGE(at != std::string::npos, got.output);
    return std::stod(got.output.substr(at + 5));
  }
  std::vector<std::string> training(const std::string& more) {
    return split_words("--data text:" + text + " --seq 8 --batch 2 --eval-samples 1 " + more);
  }
};

std::vector<Config> backbones() { return {tiny_config("llama"), tiny_gpt2()}; }

}  // namespace

TEST_CASE("untied head: a head of its own is used with a note, in one file and in several") {
  for (const Config& config : backbones())
    for (const bool sharded : {false, true}) {
      Saved saved(config, sharded);
      CHECK(saved.evaluated(saved.model, note) == saved.loss);
    }
}

TEST_CASE("untied head: --init, a new architecture, --teacher, and transplant take it along") {
  for (const Config& config : backbones()) {
    Saved saved(config);
    const std::string arch = config.arch, copy = saved.dir.file("copy"), lime = saved.dir.file("lime"),
                      moved = saved.dir.file("moved");
    check_outcome(train(saved.dir, saved.training("--steps 0 --out " + copy + " --init " + saved.model), arch),
                  Exit::done, note);
    check_outcome(train(saved.dir, saved.training("--steps 0 --out " + lime + " --init " + saved.model), "lime"),
                  Exit::done, note);
    check_outcome(run_program_inside(saved.dir, split_words("transplant --model " + saved.model + " --out " + moved)),
                  Exit::done, note);
    for (const std::string& made : {copy, lime, moved}) CHECK(saved.evaluated(made, "") == saved.loss);
    check_outcome(train(saved.dir,
                        saved.training("--steps 1 --out " + saved.dir.file("taught") + " --init " + copy +
                                       " --teacher " + saved.model),
                        arch),
                  Exit::done, note);
  }
}

TEST_CASE(
    "untied head: of zeros it makes every token equally likely; with the embedding's values it is the embedding") {
  for (Config config : backbones()) {
    config.vocab_size = 256;
    config.tie_word_embeddings = true;
    TinyModel tied(config, "cpu");
    tied.params.initialise(3);
    Saved saved(config);
    const std::string path = saved.model + "/model.safetensors";
    const auto& embedding = tied.params.at("model.embed_tokens.weight");
    std::vector<NamedTensor> values = values_of(tied.params, config);
    save_tensors(path, tied.params, values);
    const double want = saved.evaluated(saved.model, "");
    values.push_back({"lm_head.weight", embedding.shape, {embedding.value}});
    save_tensors(path, tied.params, values);
    CHECK(saved.evaluated(saved.model, "") == want);
    const Arena zeros(*tied.device, "zeros", embedding.value.bytes());
    values.back().parts = {Tensor{zeros.data(), Dtype::f32, embedding.shape}};
    save_tensors(path, tied.params, values);
    CHECK(saved.evaluated(saved.model, note) == doctest::Approx(std::log(256)).epsilon(1e-6));
  }
}

TEST_CASE("untied head: one of another shape is refused by name, and so is one that a tied model would drop") {
  Saved saved(tiny_config("llama"));
  const std::string config_path = saved.model + "/config.json";
  Config config = load_config(config_path);
  CHECK(config.tie_word_embeddings);
  TinyModel model(config, "cpu");
  check_fails(Exit::bad_data, {"lm_head.weight", "differs from the embedding"},
              [&] { load_weights(saved.model, config, model.params); });
  CHECK(!load_model_config(saved.model).tie_word_embeddings);
  std::vector<NamedTensor> values = values_of(model.params, config);
  const auto& norm = model.params.at("model.norm.weight");
  values.push_back({"lm_head.weight", norm.shape, {norm.value}});
  save_tensors(saved.model + "/model.safetensors", model.params, values);
  check_outcome(
      run_program_inside(saved.dir, split_words("evaluate --model " + saved.model + " --data text:" + saved.text)),
      Exit::bad_data, "lm_head.weight");
}
