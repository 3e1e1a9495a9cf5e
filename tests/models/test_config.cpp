// What a config.json may say: other libraries' keys, Qwen3, Llama 3.1's rotary scaling.
#include "engine/io/json.h"
#include "models/config.h"

#include "models/disk/config_json.h"
#include "tests/support/data_check.h"

using namespace crossply;
using namespace crossply::test;
using Json = nlohmann::json;

namespace {

Json minimal() {
  return {{"vocab_size", 11},       {"hidden_size", 16},        {"intermediate_size", 10},
          {"num_hidden_layers", 3}, {"num_attention_heads", 4}, {"rms_norm_eps", 1e-5}};
}
Json with(const std::string& key, const Json& value) {
  Json object = minimal();
  object[key] = value;
  return object;
}
const Json llama3 = {{"rope_type", "llama3"},   {"factor", 8.0},          {"low_freq_factor", 1.0},
                     {"high_freq_factor", 4.0}, {"rope_theta", 500000.0}, {"original_max_position_embeddings", 8192}};

}  // namespace

TEST_CASE("config: keys that mean nothing here are named and ignored, harmful ones are refused by name") {
  Json object = minimal();
  object.update(R"({"temperature": 0.6, "top_p": 0.9, "layer_types": ["full_attention"], "use_sliding_window": false,
                    "sliding_window": 4096, "max_window_layers": 2, "min_p": null, "architectures": ["X"],
                    "bos_token_id": 1, "partial_rotary_factor": 1.0})"_json);
  std::string ignored;
  parse_config(object, "c", &ignored);
  CHECK(ignored == "temperature, top_p");
  parse_config(minimal(), "c", &ignored);
  CHECK(ignored.empty());
  const Json harmful = R"({"sliding_window": [1024, 0], "use_sliding_window": [true], "hidden_act": ["gelu", "relu"],
      "attention_bias": [true], "mlp_bias": [true], "attn_logit_softcapping": [50.0],
      "final_logit_softcapping": [-30.0], "partial_rotary_factor": [0.5],
      "layer_types": [["full_attention", "sliding_attention"], "sliding_attention"],
      "quantization_config": [{"bits": 4}], "never_heard_of": [1],
      "rope_scaling": [{"rope_type": "dynamic", "factor": 2.0}, {"type": "linear"}, {"factor": 2.0}],
      "rope_interleaved": [true], "use_mrope": [true],
      "rope_parameters": [{"partial_rotary_factor": 0.5}], "rms_norm_eps": [null], "rope_theta": [null],
      "head_dim": [1073741824]})"_json;
  for (const auto& [key, values] : harmful.items())
    for (const Json& value : values) {
      CAPTURE(json_text(value));
      check_fails(Exit::bad_data, {"c: ", key}, [&] { parse_config(with(key, value), "c"); });
    }
  Json rope = with("rope_theta", 10000.0);
  rope["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 500000.0}};
  check_fails(Exit::bad_data, {"rope_theta", "10000", "500000"}, [&] { parse_config(rope, "c"); });
  check_fails(Exit::bad_data, {"gemma", "qwen3"}, [] { parse_config(with("model_type", "gemma"), "c"); });
}

TEST_CASE("config: what a hostile file holds is quoted in one short line") {
  const std::string text = "\x1b[2J\n" + std::string(100000, 'x');
  Json lime = minimal(), rope = with("rope_scaling", {{text, 1}});
  lime["crossply"] = {{"arch", "lime"}, {"routing", text}};
  Json option = minimal();
  option["crossply"] = {{"arch", "lime"}, {text, 1}};
  for (const Json& object : {with(text, 1), with("hidden_act", text), with("hidden_size", text),
                             with("model_type", text), with("layer_types", text), with("rope_parameters", text),
                             with("crossply", {{"arch", text}}), lime, rope, option}) {
    const Error error = error_of([&] { parse_config(object, "c"); });
    const std::string message = error.what();
    CHECK(error.code != Exit::done);
    // Of 100,000 bytes at most 120 are quoted; the longest message lists all architectures, these tests' drafts too.
    CHECK_MESSAGE((message.size() < 500 && message.find_first_of("\x1b\n") == message.npos), message);
  }
}

TEST_CASE("config: the ids of special tokens survive") {
  Json object = with("eos_token_id", Json::array({7, 9}));
  object["bos_token_id"] = 3;
  object["pad_token_id"] = nullptr;
  const Json saved = to_json(parse_config(object, "c"));
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) CHECK(saved.at(key) == object[key]);
  CHECK(!to_json(parse_config(minimal(), "c")).contains("eos_token_id"));
}

TEST_CASE("config: a Qwen3 is a LLaMA with q/k norms of its epsilon, and is saved as one") {
  Json object = with("model_type", "qwen3");
  check_fails(Exit::bad_data, {"head_dim"}, [&] { parse_config(object, "c"); });
  object.update({{"head_dim", 8}, {"num_key_value_heads", 2}, {"use_sliding_window", false}});
  Config config = parse_config(object, "c");
  CHECK((config.arch == "llama" && config.qk_norm && config.qk_norm_eps == 1e-5));
  const Json saved = to_json(config);
  CHECK((saved["model_type"] == "qwen3" && saved["architectures"][0] == "Qwen3ForCausalLM"));
  CHECK((!saved.contains("crossply") && to_json(parse_config(saved, "c")) == saved));
  config.qk_norm_eps = 1e-6;  // none that a Qwen3 can have
  const Json other = to_json(config);
  CHECK((other["model_type"] == "crossply_llama" && to_json(parse_config(other, "c")) == other));
  check_fails(Exit::bad_data, {"sliding"}, [&] {
    object["use_sliding_window"] = true;
    parse_config(object, "c");
  });
}

TEST_CASE("config: Llama 3.1's rotary scaling, with the frequencies of transformers, is saved back") {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    Json object = with(key, llama3);
    object["head_dim"] = 16;
    const Config config = parse_config(object, "c");
    CHECK(config.rope_theta == 500000);
    // LlamaRotaryEmbedding.inv_freq of transformers 5.23, in float
    const std::vector<double> want = {1.0,
                                      0.193922758102417,
                                      0.03760603070259094,
                                      0.00729266507551074,
                                      0.0005248460220173001,
                                      3.428102354519069e-05,
                                      6.647869668086059e-06,
                                      1.289173155782919e-06};
    const std::vector<double> got = config.rope_frequencies();
    REQUIRE(got.size() == want.size());
    for (size_t j = 0; j < want.size(); ++j) CHECK(got[j] == doctest::Approx(want[j]).epsilon(1e-6));
    const Json saved = to_json(config);
    CHECK((saved["rope_parameters"] == llama3 && saved["rope_scaling"] == llama3));
    CHECK(to_json(parse_config(saved, "c")) == saved);
  }
  const Json meaningless = R"({"factor": [0.0, "8"], "low_freq_factor": [4.0, 0.0],
                               "original_max_position_embeddings": [0, 8192.5]})"_json;
  for (const auto& [key, values] : meaningless.items())
    for (const Json& value : values) {
      Json rope = llama3;
      rope[key] = value;
      check_fails(Exit::bad_data, {key}, [&] { parse_config(with("rope_scaling", rope), "c"); });
    }
  for (const char* key : {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    Json rope = llama3;
    rope.erase(key);
    check_fails(Exit::bad_data, {key}, [&] { parse_config(with("rope_scaling", rope), "c"); });
  }
}
