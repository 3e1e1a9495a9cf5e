// config.json files as published models have them (facts, without weights): each is read as what it is, or refused with
// one line that says what crossply does not compute.
#include <nlohmann/json.hpp>

#include "engine/io/json_file.h"
#include "models/disk/config_json.h"
#include "tests/support/data_check.h"
#include "tests/support/tiny.h"

using namespace crossply;
using namespace crossply::test;
using Json = nlohmann::json;

namespace {

std::string published(const std::string& name) { return CROSSPLY_PUBLISHED "/configs/" + name + ".json"; }

// The configuration, which is saved under the model type and the class that it was published with, and read back; and
// which has as many parameters as its authors say.
Config read(const std::string& name, double parameters) {
  const Json object = read_json(published(name));
  const Config config = load_config(published(name));
  const Json saved = to_json(config);
  for (const char* key : {"model_type", "architectures", "vocab_size", "eos_token_id"})
    CHECK(saved.at(key) == object.at(key));
  CHECK(to_json(parse_config(saved, "saved")) == saved);
  ParameterTable params;
  declare_model(params, config);
  CHECK(static_cast<double>(params.count()) == doctest::Approx(parameters).epsilon(0.005));
  return config;
}

void refused(const std::string& name, const std::vector<std::string>& says) {
  const Error error = error_of([&] { load_config(published(name)); });
  CHECK(error.code == Exit::bad_data);
  const std::string message = error.what();
  CHECK(message.find('\n') == message.npos);
  for (const std::string& part : says) CHECK_MESSAGE(has(message, part), message);
}

}  // namespace

TEST_CASE("published configs: gpt2") {
  const Config c = read("gpt2", 124.4e6);
  CHECK((c.gpt2() && c.tie_word_embeddings && c.max_position_embeddings == 1024));
}

TEST_CASE("published configs: distilgpt2") { CHECK(read("distilgpt2", 81.9e6).num_hidden_layers == 6); }

TEST_CASE("published configs: Llama 3.1 8B") {
  const Config c = read("llama_3_1_8b", 8.03e9);
  CHECK((c.rope_scaling->rope_type == "llama3" && c.rope_scaling->factor == 8 && !c.tie_word_embeddings));
}

TEST_CASE("published configs: Llama 3.2 1B") {
  const Config c = read("llama_3_2_1b", 1.236e9);
  CHECK((c.rope_scaling->factor == 32 && c.tie_word_embeddings && c.head_dim == 64));
}

TEST_CASE("published configs: Llama 3.2 1B with unsloth's remarks") {
  CHECK(to_json(read("llama_3_2_1b_unsloth", 1.236e9))["pad_token_id"] == 128004);
}

TEST_CASE("published configs: TinyLlama 1.1B") { CHECK(read("tinyllama_1_1b", 1.1e9).num_key_value_heads == 4); }

TEST_CASE("published configs: SmolLM2 135M") {
  for (const char* name : {"smollm2_135m", "smollm2_135m_instruct"}) CHECK(read(name, 134.5e6).rope_theta == 100000);
}

TEST_CASE("published configs: DeepSeek LLM 7B") { CHECK(read("deepseek_llm_7b", 6.91e9).norm_eps == 1e-6); }

TEST_CASE("published configs: DeepSeek Coder 6.7B, with linear rope") {
  const Config c = read("deepseek_coder_6_7b", 6.74e9);
  CHECK((c.rope_scaling->rope_type == "linear" && c.rope_frequencies()[0] == 0.25));
}

TEST_CASE("published configs: Falcon3 1B") { CHECK(read("falcon3_1b", 1.669e9).head_dim == 256); }

TEST_CASE("published configs: Qwen2") {
  const Config small = read("qwen2_0_5b", 494e6), large = read("qwen2_7b_instruct", 7.616e9);
  CHECK((small.qkv_bias && small.tie_word_embeddings && small.sliding_window == 0));
  CHECK((large.qkv_bias && !large.tie_word_embeddings && large.sliding_window == 0));
}

TEST_CASE("published configs: Qwen2.5, as it was published and as transformers 5 saves it") {
  CHECK(read("qwen2_5_0_5b", 494e6).rope_theta == 1e6);
  const Config five = read("qwen2_5_1_5b_of_transformers_5", 1.5437e9);
  CHECK((five.rope_theta == 1e6 && !five.rope_scaling && five.sliding_window == 0));
}

TEST_CASE("published configs: Qwen2.5 with yarn") {
  const Config c = read("qwen2_5_7b_instruct_yarn", 7.616e9);
  CHECK((c.rope_scaling->rope_type == "yarn" && c.rope_scaling->original_max_position_embeddings == 32768));
  CHECK(c.rope_factor() == doctest::Approx(1.1386294));
}

TEST_CASE("published configs: Qwen3 0.6B") {
  const Config c = read("qwen3_0_6b", 596e6);
  CHECK((c.qk_norm && !c.qkv_bias && c.head_dim == 128));
}

TEST_CASE("published configs: Mistral 7B v0.3 has no window") {
  const Config c = read("mistral_7b_v0_3", 7.248e9);
  CHECK((c.mistral && c.sliding_window == 0));
}

TEST_CASE("published configs: Mistral 7B v0.1 has a window that its context exceeds, and is refused") {
  refused("mistral_7b_v0_1", {"\"sliding_window\": 4096", "32768"});
}

TEST_CASE("published configs: other types of model are refused by their type") {
  refused("mixtral_8x7b", {"model_type \"mixtral\""});
  refused("gemma_2_2b", {"model_type \"gemma2\""});
  refused("pythia_160m", {"model_type \"gpt_neox\""});
}

TEST_CASE("published configs: quantized weights are refused by name") {
  refused("llama_3_1_8b_gptq", {"\"quantization_config\""});
}
