// What config.json says of models that are LLaMAs in all but name: Mistral, Qwen2, windows, rotary scalings, and keys
// that change nothing.

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

Json with(const Json& more, const std::string& type = "llama") {
  Json object = R"({"vocab_size": 11, "hidden_size": 16, "intermediate_size": 10, "num_hidden_layers": 3,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-5,
                    "max_position_embeddings": 64})"_json;
  object["model_type"] = type;
  object.update(more);
  return object;
}
Config parsed(const Json& object) { return parse_config(object, "c"); }
void refused(const Json& object, const std::vector<std::string>& says) {
  CAPTURE(json_text(object));
  check_refused_in_a_line(says, [&] { parsed(object); });
}
// Saved and read again it is the same.
void check_round_trip(const Config& config) {
  const Json saved = to_json(config);
  CHECK(to_json(parsed(saved)) == saved);
}

}  // namespace

TEST_CASE("model types: keys that cannot change a number are accepted, and their harmful values refused by name") {
  const Json plain = to_json(parsed(with(Json::object())));
  for (const Json& harmless :
       {R"({"is_llama_config": true})"_json, R"({"rope_interleaved": false})"_json,
        R"({"transformers.js_config": {"dtype": {"fp16": "q4"}}})"_json,
        R"({"_attn_implementation_autoset": true})"_json,
        R"({"unsloth_fixed": true, "unsloth_version": "2024.9"})"_json, R"({"hidden_act": "swish"})"_json,
        R"({"use_mrope": false, "gradient_checkpointing": false, "max_sequence_length": 2048})"_json,
        R"({"activation": "swiglu", "neftune_noise_alpha": 0.0, "qk_layer_norms": false})"_json}) {
    CAPTURE(json_text(harmless));
    CHECK(to_json(parsed(with(harmless))) == plain);
  }
  refused(with({{"rope_interleaved", true}}), {"\"rope_interleaved\"", "true"});
  refused(with({{"use_mrope", true}}), {"\"use_mrope\""});
  refused(with({{"activation", "geglu"}}), {"\"activation\""});
  refused(with({{"hidden_act", "gelu"}}), {"\"hidden_act\"", "gelu"});
  refused(with({{"attention_bias", true}}), {"\"attention_bias\""});
}

TEST_CASE("model types: a model of another type is refused by its type, not by its first unknown key") {
  for (const std::string type : {"gemma2", "phi3", "qwen2_moe", "mixtral", "deepseek_v2", "gpt_neox"})
    refused(with({{"a_key_of_its_own", 1}, {"attention_bias", true}}, type),
            {"model_type \"" + type + "\"", "llama, mistral, ministral, qwen2, qwen3, gpt2"});
}

TEST_CASE("model types: a Gemma is refused with what differs from --arch gemma3n") {
  for (const std::string type : {"gemma3n", "gemma3n_text", "gemma4_text"})
    refused(with(nlohmann::json::object(), type), {"model_type \"" + type + "\"", "--arch gemma3n", "norm of values",
                                                   "1/sqrt(D)", "GELU", "AltUp", "cap of logits"});
}

TEST_CASE("model types: a Mistral without a window is a LLaMA, and is saved as a Mistral") {
  const Config config = parsed(with({{"sliding_window", nullptr}}, "mistral"));
  CHECK((config.arch == "llama" && config.mistral && !config.qkv_bias && config.sliding_window == 0));
  const Json saved = to_json(config);
  CHECK((saved["model_type"] == "mistral" && saved["architectures"] == Json::array({"MistralForCausalLM"})));
  CHECK((saved.at("sliding_window").is_null() && !saved.contains("crossply")));
  check_round_trip(config);
  Json keyless = with({{"sliding_window", nullptr}}, "mistral");
  keyless.erase("num_key_value_heads");
  refused(keyless, {"num_key_value_heads", "missing"});
}

TEST_CASE("model types: windows in the words of each type, and back") {
  const auto windows_of = [](const Json& more, const std::string& type) {
    const Config config = parsed(with(more, type));
    check_round_trip(config);
    return config.sliding_window == 0 ? "none" : str(config.sliding_window, " ", config.window_pattern);
  };
  const Json mixed = {"sliding_attention", "full_attention", "sliding_attention"};
  CHECK(windows_of({{"sliding_window", 63}}, "mistral") == "63 SSS");
  CHECK(windows_of({{"max_position_embeddings", 8192}}, "mistral") == "4096 SSS");  // as transformers takes it
  CHECK(windows_of(Json::object(), "ministral") == "4096 SSS");
  CHECK(windows_of({{"sliding_window", nullptr}}, "ministral") == "none");
  CHECK(windows_of({{"sliding_window", 8}, {"layer_types", mixed}}, "ministral") == "8 SLS");
  CHECK(to_json(parsed(with({{"sliding_window", 8}, {"layer_types", mixed}}, "ministral")))["layer_types"] == mixed);
  for (const std::string type : {"qwen2", "qwen3"}) {
    const auto of = [&](const Json& more) { return windows_of(more, type); };
    CHECK(of({{"sliding_window", 8}}) == "none");
    CHECK(of({{"sliding_window", 8}, {"use_sliding_window", false}, {"max_window_layers", 1}}) == "none");
    CHECK(of({{"sliding_window", 8}, {"use_sliding_window", true}}) == "none");  // from layer 28 on
    CHECK(of({{"sliding_window", 8}, {"use_sliding_window", true}, {"max_window_layers", 3}}) == "none");
    CHECK(of({{"sliding_window", nullptr}, {"use_sliding_window", true}, {"max_window_layers", 0}}) == "none");
    CHECK(of({{"sliding_window", 8}, {"use_sliding_window", true}, {"max_window_layers", 2}}) == "8 LLS");
    CHECK(of({{"sliding_window", 8}, {"use_sliding_window", true}, {"layer_types", mixed}}) == "8 SLS");
  }
}

TEST_CASE("model types: windows that mean nothing, or two things, are refused") {
  const Json mixed = {"sliding_attention", "full_attention", "sliding_attention"};
  refused(with({{"sliding_window", 63}}), {"\"sliding_window\": 63", "transformers' llama", "ministral"});
  CHECK(parsed(with({{"sliding_window", 64}})).sliding_window == 0);  // no sequence is longer
  refused(with({{"sliding_window", 8}, {"layer_types", mixed}}, "mistral"), {"\"sliding_window\": 8", "ministral"});
  refused(with({{"sliding_window", 8}, {"layer_types", {"sliding_attention"}}}, "ministral"), {"1 layers", "is 3"});
  refused(with({{"sliding_window", 0}}, "ministral"), {"\"sliding_window\" is 0", "null"});
  refused(with({{"layer_types", {"chunked_attention"}}}, "ministral"), {"chunked_attention"});
  for (const std::string type : {"qwen2", "qwen3"}) {
    refused(with({{"use_sliding_window", true}, {"max_window_layers", 2}}, type), {"\"use_sliding_window\""});
    refused(with({{"layer_types", {"sliding_attention"}}, {"sliding_window", 8}}, type), {"\"layer_types\""});
  }
}

TEST_CASE(
    "model types: a trainer's windows are saved as a Ministral, or in a Qwen3's words, or beside crossply's own") {
  const auto saved = [](const std::function<void(Config&)>& change) {
    Config config = tiny_config("llama");
    config.sliding_window = 5;
    change(config);
    config.check(Exit::usage, "test");
    check_round_trip(config);
    return to_json(config);
  };
  const Json plain = saved([](Config&) {});
  CHECK((plain["model_type"] == "ministral" && plain["sliding_window"] == 5 && !plain.contains("crossply")));
  CHECK(plain["layer_types"].back() == "full_attention");
  const Json qwen = saved([](Config& c) { c.qk_norm = true, c.qk_norm_eps = c.norm_eps; });
  CHECK((qwen["model_type"] == "qwen3" && qwen["use_sliding_window"] == true && qwen.contains("layer_types")));
  CHECK(!qwen.contains("crossply"));
  const Json lime = saved([](Config& c) { c.arch = "lime"; });
  CHECK(
      (lime["sliding_window"] == 5 && lime.contains("layer_types") && !lime["crossply"].contains("attention_window")));
  CHECK(saved([](Config& c) {
          c.window_pattern = std::string(static_cast<size_t>(c.num_hidden_layers), 'S');
        })["model_type"] == "mistral");
}

TEST_CASE(
    "model types: a Qwen2 has biases of q, k and v alone, on disk as transformers has them, and is saved as one") {
  const Config config = parsed(with({{"attention_bias", false}, {"max_window_layers", 21}}, "qwen2"));
  CHECK((config.arch == "llama" && config.qkv_bias && !config.qk_norm));
  const Json saved = to_json(config);
  CHECK((saved["model_type"] == "qwen2" && saved["architectures"] == Json::array({"Qwen2ForCausalLM"})));
  CHECK((saved["use_sliding_window"] == false && !saved.contains("crossply")));
  check_round_trip(config);
  ParameterTable params;
  declare_model(params, config);
  std::set<std::string> biases;
  for (const Parameter& row : params.rows())
    if (row.name.ends_with(".bias")) biases.insert(row.name);
  std::set<std::string> want;
  for (int i = 0; i < 3; ++i)
    for (const char* part : {"q", "k", "v"}) want.insert(layer_name(i, str("self_attn.", part, "_proj.bias")));
  CHECK(biases == want);
  CHECK((params.at("model.layers.1.self_attn.q_proj.bias").shape == Shape{16} &&
         params.at("model.layers.1.self_attn.v_proj.bias").shape == Shape{8}));
  Config lime = connected("lime", config), both = config;
  CHECK((to_json(lime)["model_type"] == "crossply_lime" && to_json(lime)["crossply"]["qkv_bias"] == true));
  check_round_trip(lime);
  both.qk_norm = true;
  CHECK(to_json(both)["model_type"] == "crossply_llama");
  check_round_trip(both);
  for (const std::string arch : {"lime_static", "lime_dynamic"})
    check_fails(Exit::usage, {arch, "biases"}, [&] { connected(arch, config); });
}

TEST_CASE("model types: linear and yarn have the frequencies and factors of transformers, and are saved back") {
  struct Scaled {
    Json rope;
    std::vector<double> frequencies;
    double factor;
  };
  // LlamaRotaryEmbedding's inv_freq, in float, and attention_scaling of transformers 5.24: D 16, theta 1e6, P 4096
  const std::vector<Scaled> cases = {
      {R"({"rope_type": "linear", "factor": 4.0})"_json,
       {0.25, 0.0444569848, 0.00790569466, 0.00140585331, 0.000250000012, 4.44569851e-05, 7.90569356e-06,
        1.40585337e-06},
       1},
      {R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768})"_json,
       {1.0, 0.177827939, 0.0316227786, 0.00421755994, 0.000500000024, 4.44569851e-05, 7.90569356e-06, 1.40585337e-06},
       1.138629436111989},
      {R"({"rope_type": "yarn", "factor": 8.0})"_json,
       {1.0, 0.177827939, 0.0223994683, 0.00234308885, 0.000125000006, 2.22284925e-05, 3.95284678e-06, 7.02926684e-07},
       1.2079441541679836},
      {R"({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 24,
           "beta_slow": 2, "mscale": 0.707, "mscale_all_dim": 1.0})"_json,
       {1.0, 0.177827939, 0.0213453751, 0.0019681945, 2.49999994e-05, 4.44569832e-06, 7.90569402e-07, 1.40585328e-07},
       0.9210423553163399},
      {R"({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.9,
           "truncate": false})"_json,
       {1.0, 0.177827939, 0.0286136102, 0.00298673473, 0.000250000012, 4.44569851e-05, 7.90569356e-06, 1.40585337e-06},
       0.9}};
  for (const Scaled& c : cases)
    for (const std::string key : {"rope_parameters", "rope_scaling"})
      for (const std::string spelling : {"rope_type", "type"}) {
        Json rope = c.rope;
        rope.erase("rope_type");
        rope[spelling] = c.rope["rope_type"];
        CAPTURE(json_text(rope));
        const Config config =
            parsed(with({{key, rope}, {"rope_theta", 1e6}, {"head_dim", 16}, {"max_position_embeddings", 4096}}));
        const std::vector<double> got = config.rope_frequencies();
        REQUIRE(got.size() == c.frequencies.size());
        for (size_t j = 0; j < got.size(); ++j) CHECK(got[j] == doctest::Approx(c.frequencies[j]).epsilon(1e-6));
        CHECK(config.rope_factor() == doctest::Approx(c.factor).epsilon(1e-12));
        const Json saved = to_json(config);
        for (const auto& [name, value] : c.rope.items()) CHECK(saved["rope_scaling"].at(name) == value);
        CHECK(saved["rope_scaling"] == saved["rope_parameters"]);
        check_round_trip(config);
      }
}

TEST_CASE("model types: rotary scalings that are not computed, or contradict each other, are refused by name") {
  const auto rope = [](const Json& more) { return with({{"rope_scaling", more}}); };
  for (const std::string type : {"dynamic", "longrope", "su", "mrope", "proportional"})
    refused(rope({{"type", type}, {"factor", 2.0}}), {"rope_scaling", type, "linear", "yarn"});
  refused(rope({{"rope_type", "linear"}}), {"linear needs \"factor\""});
  refused(rope({{"rope_type", "yarn"}, {"factor", nullptr}}), {"yarn needs \"factor\""});
  refused(rope({{"rope_type", "linear"}, {"factor", 2.0}, {"beta_fast", 32}}), {"rope_scaling.beta_fast"});
  refused(rope({{"rope_type", "linear"}, {"type", "yarn"}, {"factor", 2.0}}), {"rope_type", "which one"});
  refused(rope({{"rope_type", "yarn"}, {"factor", 2.0}, {"beta_slow", 64}}), {"has no meaning"});
  refused(rope({{"rope_type", "yarn"}, {"factor", 0.5}}), {"has no meaning"});
  refused(rope({{"rope_type", "yarn"}, {"factor", 2.0}, {"attention_factor", -1.0}}), {"attention_factor of -1"});
  refused(rope({{"rope_type", "yarn"}, {"factor", 2.0}, {"attention_factor", "1"}}), {"attention_factor"});
  refused(rope({{"rope_type", "yarn"}, {"factor", 2.0}, {"rope_theta", 1.0}}), {"rope_theta above 1"});
  refused(with({{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}},
                {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 10000.0}}}}),
          {"rope_parameters", "rope_scaling", "which one"});
}

TEST_CASE("model types: constants in older exports are dropped if they are what is computed, and refused otherwise") {
  struct Constant {
    Config config;
    std::string name;
    Shape shape;
    std::vector<float> right, wrong;
  };
  const Config llama = tiny_config("llama", 2, false, true, 4);
  std::vector<float> causal, windowed;
  for (int i = 0; i < 121; ++i) {
    causal.push_back(i % 11 <= i / 11 ? 1 : 0);
    windowed.push_back(i % 11 <= i / 11 && i % 11 + 3 > i / 11 ? 1 : 0);
  }
  for (const Constant& c :
       {Constant{llama, "model.layers.0.self_attn.rotary_emb.inv_freq", Shape{2}, {1, 0.01f}, {1, 0.005f}},
        Constant{tiny_gpt2(), "transformer.h.1.attn.bias", Shape{1, 1, 11, 11}, causal, windowed}}) {
    const TempDir dir;
    TinyModel model(c.config, "cpu");
    save_config(dir.file("config.json"), c.config);
    const Arena memory(*model.device, "constant", c.right.size() * sizeof(float));
    std::vector<NamedTensor> tensors = values_of(model.params, c.config);
    tensors.push_back({c.name, c.shape, {Tensor{memory.data(), Dtype::f32, c.shape}}});
    const auto load = [&](const std::vector<float>& values) {
      model.device->copy_in(memory.data(), values.data(), memory.bytes());
      save_tensors(dir.file("model.safetensors"), model.params, tensors);
      load_weights(dir.path.string(), c.config, model.params);
    };
    CHECK_NOTHROW(load(c.right));
    check_fails(Exit::bad_data, {c.name, "is not the"}, [&] { load(c.wrong); });
  }
}

TEST_CASE("model types: weights as a pickle alone are refused with the command that converts them") {
  const TempDir dir;
  Config config = tiny_config("llama");
  save_config(dir.file("config.json"), config);
  for (const char* name : {"pytorch_model.bin", "pytorch_model-00001-of-00002.bin"}) {
    write_text(dir.file(name), "PK");
    TinyModel model(config, "cpu");
    check_fails(Exit::no_input, {name, "python3 -c", "save_file", dir.path.string()},
                [&] { load_weights(dir.path.string(), config, model.params); });
    std::filesystem::remove(dir.file(name));
  }
  TinyModel model(config, "cpu");
  check_fails(Exit::no_input, {"model.safetensors"}, [&] { load_weights(dir.path.string(), config, model.params); });
}
