#include "models/config.h"

#include <algorithm>
#include <set>

#include "engine/json.h"
#include "models/json_file.h"
#include "models/registry.h"

namespace crossply {
namespace {

using nlohmann::json;

// Keys that do not change what is computed here.
const std::set<std::string> inert_keys = {
    "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "_name_or_path", "bos_token_id",
    "eos_token_id", "pad_token_id", "pretraining_tp", "_attn_implementation", "_commit_hash", "return_dict",
    "output_attentions", "output_hidden_states", "is_encoder_decoder", "id2label", "label2id"};

template <class T>
void read(const json& object, const char* key, T& into, const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return;
  const bool matches = std::is_same_v<T, bool>          ? it->is_boolean()
                       : std::is_same_v<T, std::string> ? it->is_string()
                       : std::is_same_v<T, int64_t>     ? it->is_number_integer()
                                                        : it->is_number();
  if (!matches) fail(Exit::bad_data, where, ": key \"", key, "\" has the wrong type: ", it->dump());
  into = it->get<T>();
}

// A key that crossply accepts only at the value that leaves the plain LLaMA as it is.
void require(const json& object, const char* key, const json& neutral, const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null() || *it == neutral) return;
  fail(Exit::bad_data, where, ": \"", key, "\": ", it->dump(), " is not supported; only ", neutral.dump(), " is");
}

void read_rope(const json& object, Config& config, const std::string& where) {
  read(object, "rope_theta", config.rope_theta, where);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const auto it = object.find(key);
    if (it == object.end() || it->is_null()) continue;
    if (!it->is_object()) fail(Exit::bad_data, where, ": \"", key, "\" must be an object, is ", it->dump());
    for (const auto& [name, value] : it->items()) {
      const bool is_default = (name == "rope_type" || name == "type") && value == "default";
      if (name != "rope_theta" && !is_default)
        fail(Exit::bad_data, where, ": \"", key, ".", name, "\": ", value.dump(),
             " is not supported; only rope_type \"default\" is");
    }
    read(*it, "rope_theta", config.rope_theta, where);
  }
}

// Is the option one of a few words? Others are JSON: a quoted number is none.
bool is_word(const std::string& arch, const std::string& key) {
  for (const Architecture& architecture : architectures())
    for (const Option& option : architecture.options)
      if (architecture.name == arch && option.key == key) return !option.choices.empty();
  return true;
}

void read_crossply(const json& object, Config& config, const std::string& where) {
  if (!object.is_object()) fail(Exit::bad_data, where, ": \"crossply\" must be an object");
  read(object, "arch", config.arch, where);
  read(object, "qk_norm", config.qk_norm, where);
  read(object, "qk_norm_eps", config.qk_norm_eps, where);
  for (const auto& [key, value] : object.items())
    if (key != "arch" && key != "qk_norm" && key != "qk_norm_eps" && !value.is_null())
      config.options[key] = is_word(config.arch, key) && value.is_string() ? value.get<std::string>() : value.dump();
}

constexpr int64_t most_integer = int64_t{1} << 30;

bool allowed(const Option& option, const std::string& value) {
  if (!option.choices.empty())
    return std::find(option.choices.begin(), option.choices.end(), value) != option.choices.end();
  const json parsed = try_parse_json(value), standard = json::parse(option.default_value);
  if (standard.is_number_integer()) return parsed.is_number_integer() && parsed >= 0 && parsed <= most_integer;
  if (standard.is_number_float()) return parsed.is_number();
  return parsed.type() == standard.type();
}

void check_options(Config& config, Exit code, const std::string& where) {
  const Architecture& architecture = find_architecture(config.arch, code, where);
  std::map<std::string, std::string> complete;
  for (const Option& option : architecture.options) {
    const auto it = config.options.find(option.key);
    const std::string value = it == config.options.end() ? option.default_value : it->second;
    if (!allowed(option, value)) {
      const bool integer = option.choices.empty() && json::parse(option.default_value).is_number_integer();
      fail(code, where, ": \"", option.key, "\" is ", value, ", must be: ", option.help,
           integer ? str(" (0 to ", most_integer, ")") : "");
    }
    complete[option.key] = option.choices.empty() ? json::parse(value).dump() : value;
  }
  for (const auto& [key, value] : config.options) {
    if (complete.contains(key)) continue;
    std::string known = "arch qk_norm qk_norm_eps";
    for (const Option& option : architecture.options) known += " " + option.key;
    fail(code, where, ": unknown key \"crossply.", key, "\"; ", config.arch, " knows: ", known);
  }
  config.options = complete;
  try {
    architecture.make(config);  // the connection refuses what only it can judge
  } catch (const Error& error) {
    fail(code, where, ": ", error.what());
  }
}

}  // namespace

int64_t Config::integer(const std::string& key) const { return json::parse(options.at(key)).get<int64_t>(); }
double Config::number(const std::string& key) const { return json::parse(options.at(key)).get<double>(); }

void Config::check(Exit code, const std::string& where) {
  auto positive = [&](const char* key, int64_t value) {
    const int64_t most = std::string(key) == "num_hidden_layers" ? 4096 : int64_t{1} << 30;
    if (value < 1 || value > most) fail(code, where, ": ", key, " must be in 1..", most, ", is ", value);
  };
  if (num_key_value_heads == 0) num_key_value_heads = num_attention_heads;
  positive("vocab_size", vocab_size);
  positive("hidden_size", hidden_size);
  positive("intermediate_size", intermediate_size);
  positive("num_hidden_layers", num_hidden_layers);
  positive("num_attention_heads", num_attention_heads);
  positive("num_key_value_heads", num_key_value_heads);
  positive("max_position_embeddings", max_position_embeddings);
  if (head_dim == 0) {
    if (hidden_size % num_attention_heads != 0)
      fail(code, where, ": hidden_size ", hidden_size, " is not a multiple of num_attention_heads ",
           num_attention_heads, "; change one of them or set head_dim");
    head_dim = hidden_size / num_attention_heads;
  }
  positive("head_dim", head_dim);
  if (head_dim % 2 != 0) fail(code, where, ": head_dim ", head_dim, " is odd; RoPE rotates pairs, so it must be even");
  if (num_attention_heads % num_key_value_heads != 0)
    fail(code, where, ": num_attention_heads ", num_attention_heads, " is not a multiple of num_key_value_heads ",
         num_key_value_heads);
  if (!(rms_norm_eps > 0) || !(qk_norm_eps > 0) || !(rope_theta > 0))
    fail(code, where, ": rms_norm_eps ", rms_norm_eps, ", qk_norm_eps ", qk_norm_eps, " and rope_theta ", rope_theta,
         " must be positive");
  check_options(*this, code, where);
}

Config parse_config(const json& object, const std::string& where) {
  if (!object.is_object()) fail(Exit::bad_data, where, ": a configuration must be a JSON object");
  const std::set<std::string> used = {
      "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
      "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_parameters",
      "rope_scaling", "tie_word_embeddings", "initializer_range", "hidden_act", "attention_bias", "mlp_bias",
      "attention_dropout", "model_type", "crossply"};
  for (const auto& [key, value] : object.items())
    if (!used.contains(key) && !inert_keys.contains(key))
      fail(Exit::bad_data, where, ": unknown key \"", key,
           "\". If it does not change what the model computes, remove it");
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"})
    if (!object.contains(key)) fail(Exit::bad_data, where, ": key \"", key, "\" is missing");
  Config config;
  read(object, "vocab_size", config.vocab_size, where);
  read(object, "hidden_size", config.hidden_size, where);
  read(object, "intermediate_size", config.intermediate_size, where);
  read(object, "num_hidden_layers", config.num_hidden_layers, where);
  read(object, "num_attention_heads", config.num_attention_heads, where);
  read(object, "num_key_value_heads", config.num_key_value_heads, where);
  read(object, "head_dim", config.head_dim, where);
  read(object, "max_position_embeddings", config.max_position_embeddings, where);
  read(object, "rms_norm_eps", config.rms_norm_eps, where);
  read(object, "tie_word_embeddings", config.tie_word_embeddings, where);
  read(object, "initializer_range", config.initializer_range, where);
  read_rope(object, config, where);
  require(object, "hidden_act", "silu", where);
  require(object, "attention_bias", false, where);
  require(object, "mlp_bias", false, where);
  require(object, "attention_dropout", 0.0, where);
  std::string model_type = "llama";
  read(object, "model_type", model_type, where);
  if (object.contains("crossply")) read_crossply(object["crossply"], config, where);
  if (model_type != "llama" && !object.contains("crossply"))
    fail(Exit::bad_data, where, ": model_type \"", model_type,
         "\" is not supported without a \"crossply\" object; known: llama");
  config.check(Exit::bad_data, where);
  return config;
}

Config load_config(const std::string& path) {
  return parse_config(read_json(path), path);
}

json to_json(const Config& config) {
  const bool plain = config.arch == "llama" && !config.qk_norm;
  json object = {
      {"architectures", json::array({plain ? "LlamaForCausalLM" : "CrossplyForCausalLM"})},
      {"model_type", plain ? "llama" : "crossply_" + config.arch},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.hidden_size},
      {"intermediate_size", config.intermediate_size},
      {"num_hidden_layers", config.num_hidden_layers},
      {"num_attention_heads", config.num_attention_heads},
      {"num_key_value_heads", config.num_key_value_heads},
      {"head_dim", config.head_dim},
      {"max_position_embeddings", config.max_position_embeddings},
      {"rms_norm_eps", config.rms_norm_eps},
      {"rope_theta", config.rope_theta},
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", config.rope_theta}}},
      {"tie_word_embeddings", config.tie_word_embeddings},
      {"initializer_range", config.initializer_range},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"mlp_bias", false},
      {"attention_dropout", 0.0},
      {"torch_dtype", "float32"},
      {"dtype", "float32"},
      {"use_cache", true}};
  if (plain) return object;
  for (const Option& option : find_architecture(config.arch).options) {
    const std::string& value = config.options.at(option.key);
    object["crossply"][option.key] = option.choices.empty() ? json::parse(value) : json(value);
  }
  object["crossply"]["arch"] = config.arch;
  object["crossply"]["qk_norm"] = config.qk_norm;
  if (config.qk_norm) object["crossply"]["qk_norm_eps"] = config.qk_norm_eps;
  return object;
}

}  // namespace crossply
