// Hugging Face's keys of GPT-2.
#include <algorithm>

#include "engine/json.h"
#include "engine/printable.h"
#include "models/config_keys.h"
#include "models/json_file.h"

namespace crossply {
namespace {

using nlohmann::json;

struct SizeKey {
  const char* key;
  int64_t Config::*value;
};
constexpr SizeKey size_keys[] = {{"vocab_size", &Config::vocab_size},
                                 {"n_embd", &Config::hidden_size},
                                 {"n_layer", &Config::num_hidden_layers},
                                 {"n_head", &Config::num_attention_heads},
                                 {"n_positions", &Config::max_position_embeddings}};

// Keys that change the model wherever they have another value than this, or than null.
const json neutral_values = R"({"scale_attn_weights": true, "add_cross_attention": false, "pruned_heads": {},
                                "quantization_config": null})"_json;

// Training's, and those of heads for other tasks; the order in which HF multiplies in half precision; what older
// versions of it wrote.
const std::set<std::string> gpt2_ignored = split_words(
    "attn_pdrop embd_pdrop resid_pdrop n_ctx summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj reorder_and_upcast_attn gradient_checkpointing n_special predict_special_tokens "
    "output_past _num_labels loss_type");

}  // namespace

const char* gpt2_key(int64_t Config::*size) {
  for (const SizeKey& key : size_keys)
    if (key.value == size) return key.key;
  return size == &Config::intermediate_size ? "n_inner" : nullptr;
}

bool is_gpt2(const json& object, const std::string& where) {
  std::string model_type, backbone, arch;
  read(object, "model_type", model_type, where);
  if (object.contains("crossply") && object["crossply"].is_object()) {
    read(object["crossply"], "backbone", backbone, where);
    read(object["crossply"], "arch", arch, where);
  }
  return model_type == "gpt2" || backbone == "gpt2" || arch == "gpt2";
}

Config parse_gpt2(const json& object, const std::string& where, std::string* ignored) {
  static const std::set<std::string> used = split_words(
      "vocab_size n_embd n_layer n_head n_positions n_inner activation_function layer_norm_epsilon "
      "scale_attn_by_inverse_layer_idx tie_word_embeddings initializer_range model_type crossply");
  const std::string names = check_keys(object, used, neutral_values, gpt2_ignored, where);
  if (ignored != nullptr) *ignored = names;
  Config config;
  config.arch = config.backbone = "gpt2";
  config.norm_eps = 1e-5;
  config.tie_word_embeddings = true;
  for (const SizeKey& size : size_keys) {
    if (!object.contains(size.key)) fail(Exit::bad_data, where, ": key \"", size.key, "\" is missing");
    read(object, size.key, config.*size.value, where);
  }
  if (object.contains("n_inner") && !object["n_inner"].is_null()) {
    read(object, "n_inner", config.intermediate_size, where);
    if (config.intermediate_size == 0)
      fail(Exit::bad_data, where, ": n_inner must be at least 1, or null for 4 n_embd");
  }
  for (const char* key : {"layer_norm_epsilon", "initializer_range"})
    if (object.contains(key) && object[key].is_null())
      fail(Exit::bad_data, where, ": \"", key, "\" is null; give the number that the model was trained with");
  read(object, "layer_norm_epsilon", config.norm_eps, where);
  read(object, "initializer_range", config.initializer_range, where);
  read(object, "activation_function", config.activation_function, where);
  if (config.activation_function == "gelu_pytorch_tanh") config.activation_function = "gelu_new";  // one function
  read(object, "scale_attn_by_inverse_layer_idx", config.scale_attn_by_inverse_layer_idx, where);
  read(object, "tie_word_embeddings", config.tie_word_embeddings, where);
  for (const std::string& key : token_keys)
    if (object.contains(key)) config.token_ids[key] = json_text(object[key]);
  if (object.contains("crossply")) read_crossply(object["crossply"], config, where);
  if (!config.gpt2())
    fail(Exit::bad_data, where, ": the keys are a gpt2's, \"crossply.backbone\" is '", excerpt(config.backbone), "'");
  config.check(Exit::bad_data, where);
  return config;
}

void check_gpt2(const Config& c, Exit code, const std::string& where) {
  if (c.arch == "llama") fail(code, where, ": a llama on the backbone gpt2 is the architecture gpt2; ask for that");
  if (c.num_key_value_heads != c.num_attention_heads)
    fail(code, where, ": the backbone gpt2 has as many key/value heads as query heads, ", c.num_attention_heads,
         ", not ", c.num_key_value_heads);
  if (c.head_dim * c.num_attention_heads != c.hidden_size)
    fail(code, where, ": the backbone gpt2 has heads of width C / H = ", c.hidden_size, " / ", c.num_attention_heads,
         ", not ", c.head_dim);
  if (c.qk_norm) fail(code, where, ": the backbone gpt2 has no q/k norm");
  if (c.activation_function != "gelu_new" && c.activation_function != "gelu")
    fail(code, where, ": \"activation_function\": '", excerpt(c.activation_function),
         "' is not computed here; gelu_new and gelu are");
}

// bias false has no key there: it stands in "crossply", and so does every connection.
json gpt2_json(const Config& config) {
  const bool plain = config.arch == "gpt2" && config.bias;
  json object = R"({"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "scale_attn_weights": true,
                    "torch_dtype": "float32", "dtype": "float32", "use_cache": true})"_json;
  object["architectures"] = json::array({"GPT2LMHeadModel"});
  object["model_type"] = "gpt2";
  for (const SizeKey& size : size_keys) object[size.key] = config.*size.value;
  object["n_inner"] = config.intermediate_size == 4 * config.hidden_size ? json() : json(config.intermediate_size);
  object["activation_function"] = config.activation_function;
  object["layer_norm_epsilon"] = config.norm_eps;
  object["initializer_range"] = config.initializer_range;
  object["scale_attn_by_inverse_layer_idx"] = config.scale_attn_by_inverse_layer_idx;
  object["tie_word_embeddings"] = config.tie_word_embeddings;
  for (const auto& [key, value] : config.token_ids) object[key] = known_json(value);
  if (plain) return object;
  mark_as_variant(object, config);
  object["crossply"]["backbone"] = "gpt2";
  object["crossply"]["bias"] = config.bias;
  return object;
}

}  // namespace crossply
