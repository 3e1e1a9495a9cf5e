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
  check_refused_in_a_line(says, [&] { load_config(published(name)); });
}

}  // namespace

TEST_CASE("published configs: each is read as what it is, and saved as that") {
  struct Published {
    const char* name;
    double parameters;
    bool (*is_right)(const Config& c);
  };
  for (const auto& [name, parameters, is_right] : {
           Published{
               "gpt2", 124.4e6,
               [](const Config& c) { return c.gpt2() && c.tie_word_embeddings && c.max_position_embeddings == 1024; }},
           {"distilgpt2", 81.9e6, [](const Config& c) { return c.num_hidden_layers == 6; }},
           {"llama_3_1_8b", 8.03e9,
            [](const Config& c) {
              return c.rope_scaling->rope_type == "llama3" && c.rope_scaling->factor == 8 && !c.tie_word_embeddings;
            }},
           {"llama_3_2_1b", 1.236e9,
            [](const Config& c) { return c.rope_scaling->factor == 32 && c.tie_word_embeddings && c.head_dim == 64; }},
           {"llama_3_2_1b_unsloth", 1.236e9, [](const Config& c) { return to_json(c)["pad_token_id"] == 128004; }},
           {"tinyllama_1_1b", 1.1e9, [](const Config& c) { return c.num_key_value_heads == 4; }},
           {"smollm2_135m", 134.5e6, [](const Config& c) { return c.rope_theta == 100000; }},
           {"smollm2_135m_instruct", 134.5e6, [](const Config& c) { return c.rope_theta == 100000; }},
           {"deepseek_llm_7b", 6.91e9, [](const Config& c) { return c.norm_eps == 1e-6; }},
           {"deepseek_coder_6_7b", 6.74e9,
            [](const Config& c) { return c.rope_scaling->rope_type == "linear" && c.rope_frequencies()[0] == 0.25; }},
           {"falcon3_1b", 1.669e9, [](const Config& c) { return c.head_dim == 256; }},
           {"qwen2_0_5b", 494e6,
            [](const Config& c) { return c.qkv_bias && c.tie_word_embeddings && c.sliding_window == 0; }},
           {"qwen2_7b_instruct", 7.616e9,
            [](const Config& c) { return c.qkv_bias && !c.tie_word_embeddings && c.sliding_window == 0; }},
           {"qwen2_5_0_5b", 494e6, [](const Config& c) { return c.rope_theta == 1e6; }},
           {"qwen2_5_1_5b_of_transformers_5", 1.5437e9,
            [](const Config& c) { return c.rope_theta == 1e6 && !c.rope_scaling && c.sliding_window == 0; }},
           {"qwen2_5_7b_instruct_yarn", 7.616e9,
            [](const Config& c) {
              return c.rope_scaling->rope_type == "yarn" && c.rope_scaling->original_max_position_embeddings == 32768 &&
                     c.rope_factor() == doctest::Approx(1.1386294);
            }},
           {"qwen3_0_6b", 596e6, [](const Config& c) { return c.qk_norm && !c.qkv_bias && c.head_dim == 128; }},
           {"mistral_7b_v0_3", 7.248e9, [](const Config& c) { return c.mistral && c.sliding_window == 0; }},
           {"mistral_7b_v0_1", 7.242e9,
            [](const Config& c) { return c.mistral && c.window_of(31) == 4096 && c.window_of(0) == 4096; }},
       }) {
    CAPTURE(name);
    CHECK(is_right(read(name, parameters)));
  }
}

TEST_CASE("published configs: other types of model are refused by their type") {
  refused("mixtral_8x7b", {"model_type \"mixtral\""});
  refused("gemma_2_2b", {"model_type \"gemma2\""});
  refused("pythia_160m", {"model_type \"gpt_neox\""});
}

TEST_CASE("published configs: quantized weights are refused by name") {
  refused("llama_3_1_8b_gptq", {"\"quantization_config\""});
}
