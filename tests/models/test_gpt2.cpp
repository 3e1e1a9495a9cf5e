// GPT-2's configuration and files in Hugging Face's words, and what the length of its table of positions allows.

#include "engine/io/json.h"
#include "eval/decode.h"
#include "models/disk/config_json.h"
#include "models/disk/model_dir.h"
#include "tests/support/cases.h"
#include "tests/support/data_check.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;
using Json = nlohmann::json;

namespace {

const Json minimal = R"({"model_type": "gpt2", "vocab_size": 11, "n_embd": 16, "n_layer": 3, "n_head": 4,
                         "n_positions": 8})"_json;
Json with(const Json& more) {
  Json object = minimal;
  object.update(more);
  return object;
}
Config parsed(const Json& object) { return parse_config(object, "c"); }

// OpenAI's config.json, of the 124M model but for the sizes.
const Json openai = R"({"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 10, "embd_pdrop": 0.1, "eos_token_id": 10, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 8, "n_embd": 16, "n_head": 4, "n_layer": 3, "n_positions": 8, "resid_pdrop": 0.1,
    "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
    "summary_type": "cls_index", "summary_use_proj": true, "vocab_size": 11, "reorder_and_upcast_attn": false,
    "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}})"_json;

}  // namespace

TEST_CASE("gpt2: Hugging Face's keys, their defaults, and the way back") {
  const Config config = parsed(minimal);
  CHECK((config.arch == "gpt2" && config.gpt2() && config.bias && config.tie_word_embeddings));
  CHECK((config.intermediate_size == 64 && config.head_dim == 4 && config.num_key_value_heads == 4));
  CHECK((config.norm_eps == 1e-5 && config.max_position_embeddings == 8 && config.activation_function == "gelu_new"));
  CHECK(!config.scale_attn_by_inverse_layer_idx);
  for (const Json& more :
       {R"({})"_json, R"({"n_inner": 24, "layer_norm_epsilon": 1e-3, "activation_function": "gelu"})"_json,
        R"({"scale_attn_by_inverse_layer_idx": true, "tie_word_embeddings": false, "eos_token_id": [3, 4]})"_json}) {
    CAPTURE(json_text(more));
    const Json given = with(more), saved = to_json(parsed(given));
    for (const auto& [key, value] : given.items()) CHECK(saved.at(key) == value);
    CHECK((saved["architectures"][0] == "GPT2LMHeadModel" && !saved.contains("crossply")));
    CHECK((saved.at("n_inner").is_null() || more.contains("n_inner")));
    CHECK(to_json(parsed(saved)) == saved);
  }
  std::string ignored;
  CHECK(to_json(parse_config(openai, "c", &ignored))["eos_token_id"] == 10);
  CHECK(ignored ==
        "attn_pdrop, embd_pdrop, n_ctx, reorder_and_upcast_attn, resid_pdrop, summary_first_dropout, "
        "summary_proj_to_labels, summary_type, summary_use_proj, task_specific_params");
  Json medium = openai;  // what the larger ones carry beside that
  medium.update(R"({"n_special": 0, "predict_special_tokens": true, "output_past": true, "_num_labels": 1,
                    "loss_type": null})"_json);
  CHECK(to_json(parse_config(medium, "c", &ignored)) == to_json(parsed(openai)));
  CHECK((has(ignored, "predict_special_tokens") && has(ignored, "_num_labels")));
  CHECK(to_json(parsed(with({{"activation_function", "gelu_pytorch_tanh"}}))) == to_json(config));
  parse_config(to_json(config), "c", &ignored);
  CHECK(ignored.empty());                                              // of what is written here
  CHECK(parsed(with({{"n_embd", 15}, {"n_head", 5}})).head_dim == 3);  // nothing rotates pairs
}

TEST_CASE("gpt2: what Hugging Face has no key for stands in crossply, with the backbone's name") {
  const Json plain = R"({"arch": "gpt2", "backbone": "gpt2", "bias": false})"_json;
  const Json lime = R"({"arch": "lime", "backbone": "gpt2", "bias": true, "routing": "full", "window": 0,
                        "kv_init": "uniform", "router_init": "identity", "router_bound": "fan_in",
                        "decay": "usual"})"_json;
  for (const auto& [given, want] :
       std::vector<std::pair<Json, Json>>{{plain, plain},
                                          {R"({"bias": false})"_json, plain},
                                          {R"({"backbone": "gpt2", "bias": false})"_json, plain},
                                          {lime, lime},
                                          {R"({"arch": "lime"})"_json, lime}}) {
    CAPTURE(json_text(given));
    const Json saved = to_json(parsed(with({{"crossply", given}})));
    CHECK(saved["crossply"] == want);
    const bool own = want == plain;
    CHECK(saved["architectures"][0] == (own ? "CrossplyGpt2ForCausalLM" : "CrossplyLimeForCausalLM"));
    CHECK(saved["model_type"] == (own ? "crossply_gpt2" : "crossply_lime"));
    CHECK(to_json(parsed(saved)) == saved);
  }
}

TEST_CASE("gpt2: keys and values that it has not are refused by name") {
  for (const char* key : {"vocab_size", "n_embd", "n_layer", "n_head", "n_positions"}) {
    Json object = minimal;
    object.erase(key);
    check_fails(Exit::bad_data, {"c: ", key, "missing"}, [&] { parsed(object); });
    object[key] = 0;
    check_fails(Exit::bad_data, {"c: ", key, "0"}, [&] { parsed(object); });
  }
  const Json harmful = R"({"activation_function": ["relu", "silu"], "scale_attn_weights": [false],
      "add_cross_attention": [true], "pruned_heads": [{"0": [1]}], "layer_norm_epsilon": [null, "x"],
      "initializer_range": [null], "n_inner": [0, -1, "x"], "hidden_size": [16], "num_key_value_heads": [4],
      "rope_theta": [1e4], "n_head": [3], "quantization_config": [{"bits": 4}], "never_heard_of": [1]})"_json;
  for (const auto& [key, values] : harmful.items())
    for (const Json& value : values) {
      CAPTURE(json_text(value));
      check_fails(Exit::bad_data, {"c: ", key}, [&] { parsed(with({{key, value}})); });
    }
  const Json own = R"({"arch": ["llama", "nothing"], "backbone": ["llama", "bert"], "bias": ["no"], "rate": [2],
                       "qk_norm": [true, false]})"_json;
  for (const auto& [key, values] : own.items())
    for (const Json& value : values) {
      CAPTURE(json_text(value));
      const std::string named = key == "arch" || key == "qk_norm" ? "" : key;
      check_fails(Exit::bad_data, {"c: ", named}, [&] { parsed(with({{"crossply", {{key, value}}}})); });
    }
  check_fails(Exit::bad_data, {"c: layer_norm_epsilon must be positive and finite, is -1"}, [&] {
    parsed(with({{"layer_norm_epsilon", -1}}));
  });
  check_fails(Exit::bad_data, {"must be an object"}, [&] { parsed(with({{"crossply", Json::array()}})); });
  const Json llama = R"({"vocab_size": 11, "hidden_size": 16, "intermediate_size": 10, "num_hidden_layers": 3,
                         "num_attention_heads": 4, "crossply": {"arch": "lime", "bias": true}})"_json;
  check_fails(Exit::bad_data, {"crossply.bias"}, [&] { parsed(llama); });
  Config grouped = tiny_config("lime", 2);
  grouped.backbone = "gpt2";
  check_fails(Exit::usage, {"flags", "key/value heads", "4", "2"}, [&] { grouped.check(Exit::usage, "flags"); });
  Config wide = tiny_gpt2();
  wide.head_dim = 6;
  check_fails(Exit::usage, {"flags", "8 / 4", "6"}, [&] { wide.check(Exit::usage, "flags"); });
}

namespace {

// A file's tensors with their numbers.
struct Held {
  std::vector<int64_t> shape;
  std::vector<float> numbers;
};
using Tensors = std::map<std::string, Held>;

Tensors read_all(const std::string& path) {
  Tensors tensors;
  const SafetensorsFile file(path);
  for (const TensorInfo& info : file.tensors()) {
    Held& held = tensors[info.name];
    held = {info.shape, std::vector<float>(static_cast<size_t>(info.numel()))};
    file.read_f32(info, held.numbers.data());
  }
  return tensors;
}
void write_all(const std::string& path, const Tensors& tensors) {
  std::vector<TensorToWrite> list;
  for (const auto& [name, held] : tensors) list.push_back({name, "F32", held.shape, held.numbers.data()});
  write_safetensors(path, list);
}

// A model and the tensors of its directory.
struct Saved {
  TempDir dir;
  TinyModel model;
  std::string path = dir.file("model.safetensors");
  Tensors tensors;

  explicit Saved(const Config& config) : model(config) {
    save_config(dir.file("config.json"), config);
    save_tensors(path, model.params, values_of(model.params, config));
    tensors = read_all(path);
  }
  std::vector<float> read(const std::string& row) { return model.values<float>(model.params.at(row).value); }
  // Whether another model gets the same weights from the directory.
  bool loads() {
    TinyModel other(model.config);
    other.params.initialise(7);
    load_weights(dir.path.string(), load_config(dir.file("config.json")), other.params);
    return other.values<float>(other.params.values()) == model.values<float>(model.params.values());
  }
  void refused(const std::vector<std::string>& says) {
    write_all(path, tensors);
    check_fails(Exit::bad_data, joined(std::vector{path}, says), [&] { loads(); });
  }
};

}  // namespace

TEST_CASE("gpt2: files have Hugging Face's names, with weights (in, out) and queries, keys and values in one") {
  Saved saved(tiny_gpt2());
  std::set<std::string> names = {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight",
                                 "transformer.ln_f.bias"};
  for (int l = 0; l < 4; ++l)
    for (const char* part : {"ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"})
      for (const char* end : {".weight", ".bias"}) names.insert(str("transformer.h.", l, ".", part, end));
  std::set<std::string> got;
  for (const auto& [name, held] : saved.tensors) got.insert(name);
  CHECK(got == names);

  const size_t C = 8, F = 6;
  const Held& fused = saved.tensors["transformer.h.2.attn.c_attn.weight"];
  const Held& bias = saved.tensors["transformer.h.2.attn.c_attn.bias"];
  CHECK(fused.shape == std::vector<int64_t>{8, 24});
  CHECK(saved.tensors["transformer.wpe.weight"].shape == std::vector<int64_t>{11, 8});
  size_t part = 0;
  for (const char* name : {"q", "k", "v"}) {
    const auto weight = saved.read(str("model.layers.2.self_attn.", name, "_proj.weight"));
    const auto own = saved.read(str("model.layers.2.self_attn.", name, "_proj.bias"));
    for (size_t o = 0; o < C; ++o) {
      CHECK(bias.numbers[part * C + o] == own[o]);
      for (size_t i = 0; i < C; ++i) CHECK(fused.numbers[i * 3 * C + part * C + o] == weight[o * C + i]);
    }
    ++part;
  }
  const Held& up = saved.tensors["transformer.h.1.mlp.c_fc.weight"];
  const auto weight = saved.read("model.layers.1.mlp.up_proj.weight");
  CHECK(up.shape == std::vector<int64_t>{8, 6});
  for (size_t o = 0; o < F; ++o)
    for (size_t i = 0; i < C; ++i) CHECK(up.numbers[i * F + o] == weight[o * C + i]);
}

TEST_CASE("gpt2: every model on this backbone is read as it was written; the gradients have the same names") {
  for (const Case& c : gpt2_cases()) {
    CAPTURE(c.name);
    Saved saved(c.config);
    CHECK(saved.loads());
    saved.model.step();
    const auto values = values_of(saved.model.params, c.config), gradients = gradients_of(saved.model.params, c.config);
    REQUIRE(values.size() == gradients.size());
    for (size_t i = 0; i < values.size(); ++i) CHECK(values[i].name == gradients[i].name);
  }
}

TEST_CASE("gpt2: older exports, a model without its head, and shards") {
  Saved saved(tiny_gpt2());
  Tensors bare;
  for (const auto& [name, held] : saved.tensors) bare[name.substr(std::string("transformer.").size())] = held;
  for (const char* l : {"0", "3"}) {
    std::vector<float> mask;
    for (int i = 0; i < 121; ++i) mask.push_back(i % 11 <= i / 11 ? 1 : 0);
    bare[str("h.", l, ".attn.bias")] = {{1, 1, 11, 11}, mask};
    bare[str("h.", l, ".attn.masked_bias")] = {{}, {-1e4f}};
  }
  bare["lm_head.weight"] = bare["wte.weight"];
  write_all(saved.path, bare);
  CHECK(saved.loads());
  Tensors twice = bare;  // under both of its names
  twice["transformer.wte.weight"] = bare["wte.weight"];
  write_all(saved.path, twice);
  check_fails(Exit::bad_data, {"\"wte.weight\"", "\"transformer.wte.weight\"", "remove one"}, [&] { saved.loads(); });
  write_all(saved.path, bare);
  TinyModel lime(connected("lime", tiny_gpt2()));
  find_architecture("lime").make(lime.config)->start_as_plain(lime.params, lime.config);
  lime.params.initialise(5);
  load_initial_weights(saved.dir.path.string(), saved.model.config, lime.config, lime.params);
  CHECK(lime.loss() == saved.model.loss());

  Tensors parts[2];
  Json index;
  size_t turn = 0;
  for (const auto& [name, held] : saved.tensors) {
    const size_t part = turn++ % 2;
    parts[part][name] = held;
    index["weight_map"][name] = str("model-0000", part + 1, "-of-00002.safetensors");
  }
  std::filesystem::remove(saved.path);
  for (size_t part = 0; part < 2; ++part)
    write_all(saved.dir.file(str("model-0000", part + 1, "-of-00002.safetensors")), parts[part]);
  write_text(saved.path + ".index.json", json_text(index));
  CHECK(saved.loads());
  parts[1]["transformer.ln_f.bias"] = parts[0]["transformer.ln_f.bias"] = saved.tensors["transformer.ln_f.bias"];
  for (size_t part = 0; part < 2; ++part)
    write_all(saved.dir.file(str("model-0000", part + 1, "-of-00002.safetensors")), parts[part]);
  check_fails(Exit::bad_data, {"transformer.ln_f.bias", "00001-of", "00002-of", "remove one"}, [&] { saved.loads(); });
}

TEST_CASE("gpt2: tensors that are missing, too many or of another shape are named as the file has them") {
  for (const char* name : {"transformer.wpe.weight", "transformer.h.1.attn.c_attn.bias", "transformer.ln_f.bias"}) {
    Saved saved(tiny_gpt2());
    saved.tensors.erase(name);
    saved.refused({name, "is missing"});
    saved.tensors[name] = {{5, 1}, std::vector<float>(5)};
    saved.refused({name, "[5, 1]", "does not fit"});
  }
  Saved turned(tiny_gpt2());  // (out, in)
  std::swap(turned.tensors["transformer.h.0.attn.c_attn.weight"].shape[0],
            turned.tensors["transformer.h.0.attn.c_attn.weight"].shape[1]);
  turned.refused({"transformer.h.0.attn.c_attn.weight", "[24, 8]", "8, 24"});
  Saved sick(tiny_gpt2());
  sick.tensors["transformer.h.0.attn.c_attn.weight"].numbers[7] = std::numeric_limits<float>::infinity();
  sick.refused({"transformer.h.0.attn.c_attn.weight", "inf", "element 7"});
  Saved biased(tiny_gpt2(false));
  biased.tensors["transformer.h.0.ln_1.bias"] = {{8}, std::vector<float>(8)};
  biased.refused({"transformer.h.0.ln_1.bias", "not part of"});
  Saved headless(tiny_gpt2(false));  // untied
  headless.tensors.erase("lm_head.weight");
  headless.refused({"lm_head.weight", "is missing"});
}

TEST_CASE("gpt2: no sequence is longer than the table of positions") {
  TinyModel model(tiny_gpt2());
  const auto record = [&](int64_t T) {
    Tape tape(Dtype::f32);
    record_model(tape, model.params, model.config, 1, T);
  };
  record(11);
  check_fails(Exit::usage, {"12", "11 positions"}, [&] { record(12); });
  Decoder(*model.device, model.params, model.config, 1, 11);
  check_fails(Exit::usage, {"12", "11 positions"}, [&] { Decoder(*model.device, model.params, model.config, 1, 12); });
}

TEST_CASE("gpt2: stopping in the middle changes no bit of a training, with every connection") {
  const Counting data;
  const TempDir scratch;
  size_t number = 0;
  for (const Case& c : one_in(2, gpt2_cases())) {
    CAPTURE(c.name);
    TrainPlan plan;
    plan.config = c.config;
    plan.steps = 6, plan.batch = 3, plan.warmup = 1, plan.lr = 1e-2;
    if (number % 3 == 2) plan.dtype = "bf16";
    const std::string dir = scratch.file(str(number++));
    const auto train = [&](Trainer& trainer, int64_t steps) {
      for (int64_t i = 0; i < steps; ++i) trainer.step();
      const Tensor values = trainer.params().values();
      std::vector<float> host(static_cast<size_t>(values.numel()));
      trainer.device().copy_out(host.data(), values.data, values.bytes());
      return host;
    };
    Trainer whole(plan, data), before(plan, data);
    const std::vector<float> want = train(whole, 6);
    train(before, 3);
    before.save(dir, Tokenizer());
    Trainer after(plan, data, dir);
    CHECK(train(after, 3) == want);
  }
}
