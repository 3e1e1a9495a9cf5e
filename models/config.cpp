#include "models/config.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <numbers>
#include <set>
#include <span>
#include <sstream>

#include "engine/json.h"
#include "engine/numbers.h"
#include "engine/printable.h"
#include "models/config_keys.h"
#include "models/json_file.h"
#include "models/modelling_file.h"
#include "models/registry.h"

namespace crossply {

using nlohmann::json;

std::set<std::string> split_words(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

namespace {

// The sizes among the keys; the first five must be there.
struct SizeKey {
  const char* key;
  int64_t Config::*value;
  int64_t most = int64_t{1} << 30;
};
constexpr SizeKey size_keys[] = {
    {"vocab_size", &Config::vocab_size},
    {"hidden_size", &Config::hidden_size},
    {"intermediate_size", &Config::intermediate_size},
    {"num_hidden_layers", &Config::num_hidden_layers, 4096},
    {"num_attention_heads", &Config::num_attention_heads},
    {"num_key_value_heads", &Config::num_key_value_heads},
    {"max_position_embeddings", &Config::max_position_embeddings},
    {"head_dim", &Config::head_dim, 1 << 16}};  // RoPE's angles are made while a model is recorded
constexpr size_t required_sizes = 5;

// The keys of Llama 3.1's scaling beside the length that it stretches.
struct FactorKey {
  const char* key;
  double RopeScaling::*value;
};
constexpr FactorKey factor_keys[] = {{"factor", &RopeScaling::factor},
                                     {"low_freq_factor", &RopeScaling::low_freq_factor},
                                     {"high_freq_factor", &RopeScaling::high_freq_factor}};
const std::string original_length = "original_max_position_embeddings";

// Keys that describe the file or the library that wrote it.
const std::set<std::string> inert_keys = split_words(
    "architectures torch_dtype dtype transformers_version use_cache _name_or_path pretraining_tp "
    "_attn_implementation _commit_hash return_dict output_attentions output_hidden_states is_encoder_decoder "
    "id2label label2id auto_map tokenizer_class torchscript model_max_length");

// Keys of generation, of training and of other models, which do not change the logits.
const std::set<std::string> ignored_keys = split_words(
    "temperature top_k top_p typical_p min_p do_sample num_beams num_beam_groups num_return_sequences max_length "
    "min_length max_new_tokens early_stopping length_penalty diversity_penalty repetition_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id "
    "begin_suppress_tokens suppress_tokens remove_invalid_values exponential_decay_length_penalty output_scores "
    "return_dict_in_generate decoder_start_token_id sep_token_id prefix problem_type finetuning_task "
    "task_specific_params num_labels chunk_size_feed_forward tf_legacy_loss use_bfloat16 is_decoder "
    "tie_encoder_decoder cross_attention_hidden_size max_window_layers router_aux_loss_coef output_router_logits");

// Keys that change the model wherever they have another value than this, or than null.
const json neutral_values = R"({"hidden_act": "silu", "hidden_activation": "silu", "attention_bias": false,
    "mlp_bias": false, "attention_dropout": 0.0, "partial_rotary_factor": 1.0, "use_sliding_window": false,
    "logit_softcapping": null, "attn_logit_softcapping": null, "final_logit_softcapping": null,
    "quantization_config": null, "pruned_heads": {}, "add_cross_attention": false})"_json;

}  // namespace

const std::set<std::string> token_keys = {"bos_token_id", "eos_token_id", "pad_token_id"};

std::string shown(const json& value) { return excerpt(value.dump()); }

void require(const json& object, const std::string& key, const json& neutral, const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null() || *it == neutral) return;
  fail(Exit::bad_data, where, ": \"", key, "\": ", shown(*it), " is not computed here; only ", neutral.dump(), " is");
}

std::string check_keys(const json& object, const std::set<std::string>& used, const json& neutral,
                       const std::set<std::string>& ignored, const std::string& where) {
  std::string names;
  for (const auto& [key, value] : object.items()) {
    if (neutral.contains(key)) require(object, key, neutral[key], where);
    if (used.contains(key) || inert_keys.contains(key) || token_keys.contains(key) || neutral.contains(key)) continue;
    if (!ignored_keys.contains(key) && !ignored.contains(key))
      fail(Exit::bad_data, where, ": unknown key \"", excerpt(key),
           "\". If it does not change what the model computes, remove it");
    const bool as_here = value.is_null() || (ignored.contains(key) && value == 0.0);  // nothing is dropped out
    if (!as_here) names += (names.empty() ? "" : ", ") + key;
  }
  return names;
}

namespace {

// Attention over all earlier tokens in every layer, whether the keys are there or not.
void require_full_attention(const json& object, const std::string& where) {
  if (object.contains("sliding_window") && !object.contains("use_sliding_window"))
    require(object, "sliding_window", nullptr, where);
  const json types = object.value("layer_types", json());
  for (const json& type : types.is_null() || types.is_array() ? types : json::array({types}))
    if (type != "full_attention")
      fail(Exit::bad_data, where, ": \"layer_types\" has ", shown(type),
           ", which is not computed here; only \"full_attention\" is");
}

// Refuses what is not computed here. Returns the names of what is there and ignored.
std::string check_llama_keys(const json& object, const std::string& where) {
  static const std::set<std::string> used = [] {
    std::set<std::string> keys = split_words(
        "rms_norm_eps rope_theta rope_parameters rope_scaling tie_word_embeddings initializer_range model_type "
        "crossply");
    for (const SizeKey& size : size_keys) keys.insert(size.key);
    return keys;
  }();
  const std::string ignored = check_keys(object, used, neutral_values, {"layer_types", "sliding_window"}, where);
  require_full_attention(object, where);
  return ignored;
}

RopeScaling read_llama3(const json& object, const std::string& where) {
  RopeScaling scaling;
  const auto read_needed = [&](const std::string& key, auto& into) {
    if (!object.contains(key)) fail(Exit::bad_data, where, ": rope_type llama3 needs \"", key, "\"");
    read(object, key.c_str(), into, where);
  };
  for (const FactorKey& f : factor_keys) read_needed(f.key, scaling.*f.value);
  read_needed(original_length, scaling.original_max_position_embeddings);
  if (!(scaling.factor >= 1) || !(scaling.low_freq_factor > 0) || scaling.original_max_position_embeddings < 1 ||
      !(scaling.high_freq_factor > scaling.low_freq_factor) || !std::isfinite(scaling.factor) ||
      !std::isfinite(scaling.high_freq_factor))
    fail(Exit::bad_data, where, ": rope_type llama3 with ", shown(object), " has no meaning");
  return scaling;
}

void read_rope(const json& object, Config& config, const std::string& where) {
  read(object, "rope_theta", config.rope_theta, where);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const auto it = object.find(key);
    if (it == object.end() || it->is_null()) continue;
    if (!it->is_object()) fail(Exit::bad_data, where, ": \"", key, "\" must be an object, is ", shown(*it));
    const json type = it->value("rope_type", it->value("type", json("default")));
    const bool llama3 = type == "llama3";
    if (!llama3 && type != "default")
      fail(Exit::bad_data, where, ": \"", key, ".rope_type\": ", shown(type),
           " is not computed here; \"default\" and \"llama3\" are");
    require(*it, "partial_rotary_factor", 1.0, str(where, ": ", key));
    for (const auto& [name, value] : it->items()) {
      static const auto always = split_words("rope_theta rope_type type partial_rotary_factor");
      static const auto scaling = split_words("factor low_freq_factor high_freq_factor " + original_length);
      if (!always.contains(name) && !(llama3 && scaling.contains(name)))
        fail(Exit::bad_data, where, ": \"", key, ".", excerpt(name), "\": ", shown(value), " is not computed here");
    }
    if (llama3) config.rope_scaling = read_llama3(*it, str(where, ": ", key));
    if (object.contains("rope_theta") && it->contains("rope_theta") && object["rope_theta"] != (*it)["rope_theta"])
      fail(Exit::bad_data, where, ": \"rope_theta\" is ", shown(object["rope_theta"]), ", \"", key, ".rope_theta\" is ",
           shown((*it)["rope_theta"]), "; which one is meant? Make them equal");
    read(*it, "rope_theta", config.rope_theta, where);
  }
}

// Of the object "crossply", beside the architecture's options.
const char* general_keys(const Config& config) {
  return config.gpt2() ? "arch backbone bias" : "arch backbone qk_norm qk_norm_eps";
}

// Is the option one of a few words? Others are JSON: a quoted number is none.
bool is_word(const std::string& arch, const std::string& key) {
  for (const Architecture& architecture : architectures())
    for (const Option& option : architecture.options)
      if (architecture.name == arch && option.key == key) return !option.choices.empty();
  return true;
}

}  // namespace

void read_crossply(const json& object, Config& config, const std::string& where) {
  if (!object.is_object()) fail(Exit::bad_data, where, ": \"crossply\" must be an object");
  read(object, "arch", config.arch, where);
  read(object, "backbone", config.backbone, where);
  read(object, "qk_norm", config.qk_norm, where);
  read(object, "qk_norm_eps", config.qk_norm_eps, where);
  read(object, "bias", config.bias, where);
  const std::set<std::string> own = split_words(general_keys(config));
  for (const auto& [key, value] : object.items())
    if (!own.contains(key) && !value.is_null())
      config.options[key] = is_word(config.arch, key) && value.is_string() ? value.get<std::string>() : value.dump();
}

void mark_as_variant(json& object, const Config& config) {
  json& own = object["crossply"];
  for (const Option& option : find_architecture(config.arch).options) {
    const std::string& value = config.options.at(option.key);
    own[option.key] = option.choices.empty() ? json::parse(value) : json(value);
  }
  own["arch"] = config.arch;
  const std::string name = "Crossply" + class_stem(config.arch), module = modelling_module(config.arch);
  object["model_type"] = "crossply_" + config.arch;
  object["architectures"] = json::array({name + "ForCausalLM"});
  if (module.empty()) return;
  object["auto_map"] = {{"AutoConfig", module + "." + name + "Config"},
                        {"AutoModelForCausalLM", module + "." + name + "ForCausalLM"}};
}

namespace {

constexpr int64_t most_integer = int64_t{1} << 30;

bool allowed(const Option& option, const std::string& value) {
  if (!option.choices.empty())
    return std::find(option.choices.begin(), option.choices.end(), value) != option.choices.end();
  if (parse_truth(option.default_value)) return parse_truth(value).has_value();
  if (parse_integer(option.default_value)) {
    const auto number = parse_integer(value);
    return number && *number >= 0 && *number <= most_integer;
  }
  if (parse_number(option.default_value)) return parse_number(value).has_value();
  return try_parse_json(value).is_array();
}

// An allowed value as it stands in JSON.
std::string as_json(const Option& option, const std::string& value) {
  if (!option.choices.empty() || parse_truth(value)) return value;
  if (parse_integer(option.default_value)) return std::to_string(*parse_integer(value));
  if (const auto number = parse_number(value)) return json(*number).dump();
  return json::parse(value).dump();
}

void check_options(Config& config, Exit code, const std::string& where) {
  const Architecture& architecture = find_architecture(config.arch, code, where);
  std::map<std::string, std::string> complete;
  for (const Option& option : architecture.options) {
    const auto it = config.options.find(option.key);
    const std::string value = it == config.options.end() ? option.default_value : it->second;
    if (!allowed(option, value)) {
      fail(code, where, ": \"", option.key, "\" is ", excerpt(value), ", must be: ", option.help,
           parse_integer(option.default_value) && option.help.find("..") == std::string::npos
               ? str(" (0 to ", most_integer, ")")
               : "");
    }
    complete[option.key] = as_json(option, value);
  }
  for (const auto& [key, value] : config.options) {
    if (complete.contains(key)) continue;
    std::string known = general_keys(config);
    for (const Option& option : architecture.options) known += " " + option.key;
    fail(code, where, ": unknown key \"crossply.", excerpt(key), "\"; ", config.arch, " knows: ", known);
  }
  config.options = complete;
  try {
    architecture.make(config);  // the connection refuses what only it can judge
  } catch (const Error& error) {
    fail(code, where, ": ", error.what());
  }
}

}  // namespace

int64_t Config::integer(const std::string& key) const { return parse_integer(options.at(key)).value(); }
double Config::number(const std::string& key) const { return parse_number(options.at(key)).value(); }

std::vector<double> Config::rope_frequencies() const {
  std::vector<double> frequencies;
  for (int64_t j = 0; j < head_dim / 2; ++j) {
    double w = std::pow(rope_theta, -2.0 * static_cast<double>(j) / static_cast<double>(head_dim));
    if (rope_scaling) {
      const auto length = static_cast<double>(rope_scaling->original_max_position_embeddings);
      const double low = rope_scaling->low_freq_factor, high = rope_scaling->high_freq_factor;
      const double turns = length * w / (2 * std::numbers::pi);
      const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
      w = (1 - kept) * w / rope_scaling->factor + kept * w;
    }
    frequencies.push_back(w);
  }
  return frequencies;
}

void Config::check(Exit code, const std::string& where) {
  auto check_size = [&](const SizeKey& size) {
    const int64_t value = this->*size.value;
    const char* own = gpt2() ? gpt2_key(size.value) : nullptr;
    if (value < 1 || value > size.most)
      fail(code, where, ": ", own != nullptr ? own : size.key, " must be in 1..", size.most, ", is ", value);
  };
  if (num_key_value_heads == 0) num_key_value_heads = num_attention_heads;
  if (arch == "gpt2") backbone = "gpt2";
  if (backbone != "llama" && backbone != "gpt2")
    fail(code, where, ": unknown backbone '", excerpt(backbone), "'; known: llama gpt2");
  if (gpt2() && intermediate_size == 0) intermediate_size = 4 * hidden_size;
  const SizeKey& last = *std::rbegin(size_keys);
  std::for_each(std::begin(size_keys), &last, check_size);
  if (head_dim == 0) {
    if (hidden_size % num_attention_heads != 0)
      fail(code, where, ": ", gpt2() ? "n_embd " : "hidden_size ", hidden_size, " is not a multiple of ",
           gpt2() ? "n_head " : "num_attention_heads ", num_attention_heads, "; change one of them",
           gpt2() ? "" : " or set head_dim");
    head_dim = hidden_size / num_attention_heads;
  }
  check_size(last);
  if (gpt2()) check_gpt2(*this, code, where);
  else if (head_dim % 2 != 0)
    fail(code, where, ": head_dim ", head_dim, " is odd; RoPE rotates pairs, so it must be even");
  if (num_attention_heads % num_key_value_heads != 0)
    fail(code, where, ": num_attention_heads ", num_attention_heads, " is not a multiple of num_key_value_heads ",
         num_key_value_heads);
  const std::pair<const char*, double> positive[] = {{gpt2() ? "layer_norm_epsilon" : "rms_norm_eps", norm_eps},
                                                     {"crossply.qk_norm_eps", qk_norm_eps},
                                                     {"rope_theta", rope_theta}};
  for (const auto& [key, number] : positive)
    if (!(number > 0) || !std::isfinite(number))
      fail(code, where, ": ", key, " must be positive and finite, is ", number);
  check_options(*this, code, where);
}

namespace {

// What the model_type says beside the sizes; a "crossply" object says it all.
void read_model_type(const json& object, Config& config, const std::string& where) {
  std::string model_type = "llama";
  read(object, "model_type", model_type, where);
  if (object.contains("crossply")) return read_crossply(object["crossply"], config, where);
  if (model_type == "llama") return;
  if (model_type != "qwen3")
    fail(Exit::bad_data, where, ": model_type \"", excerpt(model_type),
         "\" is not supported without a \"crossply\" object; known: llama, qwen3, gpt2");
  for (const char* key : {"head_dim", "num_key_value_heads"})  // defaults there are those of one size
    if (!object.contains(key)) fail(Exit::bad_data, where, ": key \"", key, "\" is missing");
  config.qk_norm = true;
  config.qk_norm_eps = config.norm_eps;
}

}  // namespace

Config parse_config(const json& object, const std::string& where, std::string* ignored) {
  if (!object.is_object()) fail(Exit::bad_data, where, ": a configuration must be a JSON object");
  if (is_gpt2(object, where)) return parse_gpt2(object, where, ignored);
  const std::string names = check_llama_keys(object, where);
  if (ignored != nullptr) *ignored = names;
  for (const SizeKey& size : std::span(size_keys).first<required_sizes>())
    if (!object.contains(size.key)) fail(Exit::bad_data, where, ": key \"", size.key, "\" is missing");
  for (const char* key : {"rms_norm_eps", "rope_theta", "initializer_range"})  // what inf and nan become in JSON
    if (object.contains(key) && object[key].is_null())
      fail(Exit::bad_data, where, ": \"", key, "\" is null; give the number that the model was trained with");
  Config config;
  for (const SizeKey& size : size_keys) read(object, size.key, config.*size.value, where);
  read(object, "rms_norm_eps", config.norm_eps, where);
  read(object, "tie_word_embeddings", config.tie_word_embeddings, where);
  read(object, "initializer_range", config.initializer_range, where);
  read_rope(object, config, where);
  for (const std::string& key : token_keys)
    if (object.contains(key)) config.token_ids[key] = object[key].dump();
  read_model_type(object, config, where);
  config.check(Exit::bad_data, where);
  return config;
}

Config load_config(const std::string& path) {
  std::string ignored;
  Config config = parse_config(read_json(path), path, &ignored);
  if (!ignored.empty())
    std::fprintf(stderr, "note: %s: ignored, since nothing here depends on them: %s\n", path.c_str(), ignored.c_str());
  std::fputs(note_idle_options(config, path).c_str(), stderr);
  return config;
}

namespace {

json rope_json(const Config& config) {
  json rope = {{"rope_type", "default"}, {"rope_theta", config.rope_theta}};
  if (!config.rope_scaling) return rope;
  const RopeScaling& scaling = *config.rope_scaling;
  rope["rope_type"] = "llama3";
  for (const FactorKey& f : factor_keys) rope[f.key] = scaling.*f.value;
  rope[original_length] = scaling.original_max_position_embeddings;
  return rope;
}

}  // namespace

json to_json(const Config& config) {
  if (config.gpt2()) return gpt2_json(config);
  const bool qwen3 = config.arch == "llama" && config.qk_norm && config.qk_norm_eps == config.norm_eps;
  const bool plain = config.arch == "llama" && (qwen3 || !config.qk_norm);
  json object = R"({"hidden_act": "silu", "attention_bias": false, "mlp_bias": false, "attention_dropout": 0.0,
                    "torch_dtype": "float32", "dtype": "float32", "use_cache": true})"_json;
  object["architectures"] = json::array({qwen3 ? "Qwen3ForCausalLM" : "LlamaForCausalLM"});
  object["model_type"] = qwen3 ? "qwen3" : "llama";
  object["rms_norm_eps"] = config.norm_eps;
  object["rope_theta"] = config.rope_theta;
  object["rope_parameters"] = rope_json(config);
  object["tie_word_embeddings"] = config.tie_word_embeddings;
  object["initializer_range"] = config.initializer_range;
  for (const SizeKey& size : size_keys) object[size.key] = config.*size.value;
  if (config.rope_scaling) object["rope_scaling"] = rope_json(config);  // the name that older readers know
  if (qwen3) object["use_sliding_window"] = false;
  for (const auto& [key, value] : config.token_ids) object[key] = json::parse(value);
  if (plain) return object;
  mark_as_variant(object, config);
  object["crossply"]["qk_norm"] = config.qk_norm;
  if (config.qk_norm) object["crossply"]["qk_norm_eps"] = config.qk_norm_eps;
  return object;
}

}  // namespace crossply
