// Hugging Face's keys of GPT-2.
#include <algorithm>

#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "models/disk/config_keys.h"

namespace crossply {
namespace {

using nlohmann::json;

// Keys that change the model wherever they have another value than this, or than null.
const json gpt2_neutral = R"({"scale_attn_weights": true, "add_cross_attention": false, "pruned_heads": {},
                                "quantization_config": null})"_json;

// Training's, and those of heads for other tasks; the order in which HF multiplies in half precision; what older
// versions of it wrote.
const std::set<std::string> gpt2_ignored = split_words(
    "attn_pdrop embd_pdrop resid_pdrop n_ctx summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj reorder_and_upcast_attn gradient_checkpointing n_special predict_special_tokens "
    "output_past _num_labels loss_type");

// n_inner may be missing.
bool is_required(const SizeKey& size) { return size.gpt2_key != nullptr && size.value != &Config::intermediate_size; }

}  // namespace

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
      "scale_attn_by_inverse_layer_idx tie_word_embeddings initializer_range model_type crossply "
      "final_logit_softcapping");
  const std::string names = check_keys(object, used, gpt2_neutral, gpt2_ignored, where);
  if (ignored != nullptr) *ignored = names;
  Config config;
  config.arch = config.backbone = "gpt2";
  config.norm_eps = 1e-5;
  config.tie_word_embeddings = true;
  for (const SizeKey& size : size_keys) {
    if (!is_required(size)) continue;
    if (!object.contains(size.gpt2_key)) fail(Exit::bad_data, where, ": key \"", size.gpt2_key, "\" is missing");
    read(object, size.gpt2_key, config.*size.value, where);
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
  read_softcap(object, config, where);
  for (const std::string& key : token_keys)
    if (object.contains(key)) config.token_ids[key] = json_text(object[key]);
  if (object.contains("crossply")) read_crossply(object["crossply"], config, where);
  if (!config.gpt2())
    fail(Exit::bad_data, where, ": the keys are a gpt2's, \"crossply.backbone\" is '", excerpt(config.backbone), "'");
  config.check(Exit::bad_data, where);
  return config;
}

// bias false has no key there: it stands in "crossply", and so does every connection.
json gpt2_json(const Config& config) {
  const bool plain = config.arch == "gpt2" && config.bias && !has_general_options(config);
  json object = R"({"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "scale_attn_weights": true,
                    "torch_dtype": "float32", "dtype": "float32", "use_cache": true})"_json;
  object["architectures"] = json::array({"GPT2LMHeadModel"});
  object["model_type"] = "gpt2";
  for (const SizeKey& size : size_keys)
    if (is_required(size)) object[size.gpt2_key] = config.*size.value;
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
