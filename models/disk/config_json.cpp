#include "models/disk/config_json.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <set>
#include <span>
#include <sstream>

#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"
#include "models/combined.h"
#include "models/disk/config_keys.h"
#include "models/disk/modelling_file.h"

namespace crossply {

using nlohmann::json;

std::set<std::string> split_words(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

namespace {

// Keys that describe the file or the library that wrote it.
const std::set<std::string> inert_keys = split_words(
    "architectures torch_dtype dtype transformers_version use_cache _name_or_path pretraining_tp "
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal attn_implementation "
    "_flash_attn_2_enabled _commit_hash return_dict output_attentions output_hidden_states is_encoder_decoder "
    "id2label label2id auto_map tokenizer_class torchscript model_max_length is_llama_config transformers.js_config "
    "unsloth_fixed unsloth_version custom_pipelines");

// Keys of generation, of training and of other models, which do not change the logits.
const std::set<std::string> ignored_keys = split_words(
    "temperature top_k top_p typical_p min_p do_sample num_beams num_beam_groups num_return_sequences max_length "
    "min_length max_new_tokens early_stopping length_penalty diversity_penalty repetition_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id "
    "begin_suppress_tokens suppress_tokens remove_invalid_values exponential_decay_length_penalty output_scores "
    "return_dict_in_generate decoder_start_token_id sep_token_id prefix problem_type finetuning_task "
    "task_specific_params num_labels chunk_size_feed_forward tf_legacy_loss use_bfloat16 is_decoder "
    "tie_encoder_decoder cross_attention_hidden_size router_aux_loss_coef output_router_logits gradient_checkpointing "
    "max_sequence_length neftune_noise_alpha");

// Keys that change the model wherever they have another value than this, or than null.
const json neutral_values = R"({"attention_bias": false, "mlp_bias": false, "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0, "rope_interleaved": false, "use_mrope": false, "activation": "swiglu",
    "qk_layer_norms": false, "logit_softcapping": null, "attn_logit_softcapping": null,
    "quantization_config": null, "pruned_heads": {}, "add_cross_attention": false})"_json;

// The types of model whose block is LLaMA's.
struct ModelType {
  const char* name;
  const char* architecture;
  int64_t positions;                     // where max_position_embeddings says none
  std::vector<const char*> needed = {};  // keys whose defaults are those of one size
  bool qkv_bias = false, qk_norm = false;
  int64_t window = 0;          // where "sliding_window" says none
  bool asks_window = false;    // a window counts only if use_sliding_window says so
  bool lists_windows = false;  // layer_types may say which layers have it
};
const std::vector<ModelType> model_types = {{.name = "llama", .architecture = "LlamaForCausalLM", .positions = 2048},
                                            {.name = "mistral",
                                             .architecture = "MistralForCausalLM",
                                             .positions = 131072,
                                             .needed = {"num_key_value_heads"},
                                             .window = 4096},
                                            {.name = "ministral",
                                             .architecture = "MinistralForCausalLM",
                                             .positions = 131072,
                                             .needed = {"num_key_value_heads"},
                                             .window = 4096,
                                             .lists_windows = true},
                                            {.name = "qwen2",
                                             .architecture = "Qwen2ForCausalLM",
                                             .positions = 32768,
                                             .needed = {"num_key_value_heads"},
                                             .qkv_bias = true,
                                             .asks_window = true,
                                             .lists_windows = true},
                                            {.name = "qwen3",
                                             .architecture = "Qwen3ForCausalLM",
                                             .positions = 32768,
                                             .needed = {"head_dim", "num_key_value_heads"},
                                             .qk_norm = true,
                                             .asks_window = true,
                                             .lists_windows = true}};

}  // namespace

const std::set<std::string> token_keys = {"bos_token_id", "eos_token_id", "pad_token_id"};

std::string shown(const json& value) { return excerpt(json_text(value)); }

void require(const json& object, const std::string& key, const json& neutral, const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null() || *it == neutral) return;
  fail(Exit::bad_data, where, ": \"", key, "\": ", shown(*it), " is not computed here; only ", json_text(neutral),
       " is");
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

// The type that model_type names. Of a model with a "crossply" object, which says it all, LLaMA's.
const ModelType& type_of(const json& object, const std::string& where) {
  std::string name = "llama", known;
  read(object, "model_type", name, where);
  for (const ModelType& type : model_types) {
    if (type.name == name || object.contains("crossply")) return type;
    known += str(type.name, ", ");
  }
  if (name.starts_with("gemma3n") || name.starts_with("gemma4"))
    fail(Exit::bad_data, where, ": model_type \"", excerpt(name),
         "\" is not what --arch gemma3n computes, which has Gemma's per-layer embeddings and LAuReL on LLaMA's block. "
         "What differs: a norm of values, attention without 1/sqrt(D), windows, norms behind the sublayers, GELU and "
         "sparse activations in the feed-forward part, alternating updates (AltUp), and the cap of logits");
  fail(Exit::bad_data, where, ": model_type \"", excerpt(name),
       "\" is not supported without a \"crossply\" object; known: ", known, "gpt2");
}

// What "layer_types" says of each layer, S for sliding and L for full attention; "" where there is no list.
std::string listed_layers(const json& object, const std::string& where) {
  std::string letters;
  const json types = object.value("layer_types", json());
  for (const json& type : types.is_null() || types.is_array() ? types : json::array({types})) {
    if (type != "full_attention" && type != "sliding_attention")
      fail(Exit::bad_data, where, ": \"layer_types\" has ", shown(type),
           ", which is not computed here; only \"full_attention\" and \"sliding_attention\" are");
    letters += type == "sliding_attention" ? 'S' : 'L';
  }
  return letters;
}

// Which layers have a window where nothing lists them: a Mistral's all, a Qwen's from layer max_window_layers on.
std::string usual_layers(const json& object, const ModelType& type, int64_t L, const std::string& where) {
  int64_t first = type.asks_window ? 28 : 0;
  if (type.asks_window) read(object, "max_window_layers", first, where);
  const auto full = static_cast<size_t>(std::clamp<int64_t>(first, 0, L));
  return std::string(full, 'L') + std::string(static_cast<size_t>(L) - full, 'S');
}

// The window, and the layers that have it. A Qwen's counts only if use_sliding_window says so; null is none. A LLaMA in
// transformers knows no window, so the key must not mean anything there.
void read_windows(const json& object, const ModelType& type, Config& config, const std::string& where) {
  const int64_t L = config.num_hidden_layers;
  const std::string listed = listed_layers(object, where);
  const bool lists = listed.find('S') != std::string::npos;
  const bool asked = object.contains("use_sliding_window") && object["use_sliding_window"] == true;
  bool used = !type.asks_window;
  int64_t window = type.window;
  if (type.asks_window) read(object, "use_sliding_window", used, where);  // others do not know the key
  const bool none = object.contains("sliding_window") && object["sliding_window"].is_null();
  read(object, "sliding_window", window, where);
  if (lists && (!used || none || window == 0))
    fail(Exit::bad_data, where, ": \"layer_types\" has \"sliding_attention\", but there is no window");
  if (asked && !none && window == 0)
    fail(Exit::bad_data, where, ": \"use_sliding_window\" is true, but \"sliding_window\" is missing");
  if (!used || none || (window == 0 && !object.contains("sliding_window"))) return;
  if (window < 1) fail(Exit::bad_data, where, ": \"sliding_window\" is ", window, "; give null where there is none");
  const bool knows_types = type.lists_windows || object.contains("crossply");
  if (!knows_types && (type.window == 0 || (!listed.empty() && listed.find('L') != std::string::npos))) {
    if (type.window == 0 && !lists && window >= config.max_position_embeddings) return;
    fail(Exit::bad_data, where, ": \"sliding_window\": ", window, ", but transformers' ", type.name,
         type.window == 0 ? " attends to all tokens" : " has it in all layers, whatever \"layer_types\" says",
         "; if the model has windows, its model_type is ministral");
  }
  if (lists && std::ssize(listed) != L)
    fail(Exit::bad_data, where, ": \"layer_types\" lists ", listed.size(), " layers, num_hidden_layers is ", L);
  const std::string pattern = knows_types && !listed.empty() ? listed : usual_layers(object, type, L, where);
  if (pattern.find('S') == std::string::npos) return;
  config.sliding_window = window, config.window_pattern = pattern;
}

// Refuses what is not computed here. Returns the names of what is there and ignored.
std::string check_llama_keys(const json& object, const ModelType& type, const std::string& where) {
  std::set<std::string> used = split_words(
      "rms_norm_eps rope_theta rope_parameters rope_scaling tie_word_embeddings initializer_range model_type crossply "
      "hidden_act hidden_activation layer_types sliding_window use_sliding_window max_window_layers "
      "final_logit_softcapping");
  for (const SizeKey& size : size_keys) used.insert(size.key);
  json neutral = neutral_values;
  if (type.qkv_bias) used.insert("attention_bias"), neutral.erase("attention_bias");  // by its type
  const std::string ignored = check_keys(object, used, neutral, {}, where);
  for (const char* key : {"hidden_act", "hidden_activation"})
    if (!object.contains(key) || object[key] != "swish") require(object, key, "silu", where);  // two names of one
  return ignored;
}

// Is the option one of a few words? Others are JSON: a quoted number is none.
bool is_word(const std::string& arch, const std::string& key) {
  for (const std::string& part : parts_of(arch))
    for (const Architecture& architecture : architectures())
      for (const Option& option : architecture.options)
        if (architecture.name == part && (option.key == key || part + "_" + option.key == key))
          return !option.choices.empty();
  return true;
}

}  // namespace

void read_softcap(const json& object, Config& config, const std::string& where) {
  if (object.contains("final_logit_softcapping") && !object["final_logit_softcapping"].is_null())
    read(object, "final_logit_softcapping", config.final_logit_softcapping, where);
}

void read_crossply(const json& object, Config& config, const std::string& where) {
  if (!object.is_object()) fail(Exit::bad_data, where, ": \"crossply\" must be an object");
  read(object, "arch", config.arch, where);
  read(object, "backbone", config.backbone, where);
  read(object, "qk_norm", config.qk_norm, where);
  read(object, "qk_norm_eps", config.qk_norm_eps, where);
  read(object, "qkv_bias", config.qkv_bias, where);
  read(object, "bias", config.bias, where);
  for (const GeneralOption& option : general_options()) {
    if (option.outside) continue;
    const json& list = option.list && object.contains(option.key) ? object[option.key] : json();
    if (!option.list)
      std::visit([&](auto* member) { read(object, option.key, *member, where); }, option.member(config));
    else if (!list.is_null()) set_option(config, option, list.is_string() ? list.get<std::string>() : json_text(list));
  }
  if (config.engram.map != "none" && !config.engram.map.starts_with("["))  // a flag's is a file
    fail(Exit::bad_data, where, ": \"engram_map\" is ", excerpt(config.engram.map),
         ", must be none, or a list of numbers");
  const std::set<std::string> own = split_words(general_keys(config));
  for (const auto& [key, value] : object.items())
    if (!own.contains(key) && !value.is_null())
      config.options[key] =
          is_word(config.arch, key) && value.is_string() ? value.get<std::string>() : json_text(value);
}

namespace {

// Of the options that every architecture has those that are not as usual.
void write_general_options(json& own, Config config) {
  Config usual;
  for (const GeneralOption& option : general_options())
    std::visit(
        [&]<class T>(T* member) {
          if (option.outside || *member == *std::get<T*>(option.member(usual))) return;
          if constexpr (std::is_same_v<T, std::string>)
            own[option.key] = member->starts_with("[") ? known_json(*member) : json(*member);
          else own[option.key] = *member;
        },
        option.member(config));
}

}  // namespace

void mark_as_variant(json& object, const Config& config) {
  if (config.final_logit_softcapping != 0) object["final_logit_softcapping"] = config.final_logit_softcapping;
  json& own = object["crossply"];
  write_general_options(own, config);
  for (const Option& option : find_architecture(config.arch).options) {
    const std::string& value = config.options.at(option.key);
    own[option.key] = option.choices.empty() ? known_json(value) : json(value);
  }
  own["arch"] = config.arch;
  const std::string name = "Crossply" + class_stem(config.arch), module = modelling_module(config.arch);
  object["model_type"] = library_name(config.arch);
  object["architectures"] = json::array({name + "ForCausalLM"});
  if (module.empty() || !without_modelling_file(config).empty()) return;
  object["auto_map"] = {{"AutoConfig", module + "." + name + "Config"},
                        {"AutoModelForCausalLM", module + "." + name + "ForCausalLM"}};
}

namespace {

// What the model_type says beside the sizes; a "crossply" object says it all.
void take_type(const json& object, const ModelType& type, Config& config, const std::string& where) {
  if (object.contains("crossply")) return read_crossply(object["crossply"], config, where);
  for (const char* key : type.needed)
    if (!object.contains(key)) fail(Exit::bad_data, where, ": key \"", key, "\" is missing");
  config.mistral = type.name == std::string("mistral");
  config.qkv_bias = type.qkv_bias;
  config.qk_norm = type.qk_norm;
  if (config.qk_norm) config.qk_norm_eps = config.norm_eps;
}

}  // namespace

Config parse_config(const json& object, const std::string& where, std::string* ignored) {
  if (!object.is_object()) fail(Exit::bad_data, where, ": a configuration must be a JSON object");
  if (is_gpt2(object, where)) return parse_gpt2(object, where, ignored);
  const ModelType& type = type_of(object, where);
  const std::string names = check_llama_keys(object, type, where);
  if (ignored != nullptr) *ignored = names;
  for (const SizeKey& size : std::span(size_keys).first<5>())
    if (!object.contains(size.key)) fail(Exit::bad_data, where, ": key \"", size.key, "\" is missing");
  for (const char* key : {"rms_norm_eps", "rope_theta", "initializer_range"})  // what inf and nan become in JSON
    if (object.contains(key) && object[key].is_null())
      fail(Exit::bad_data, where, ": \"", key, "\" is null; give the number that the model was trained with");
  Config config;
  config.max_position_embeddings = type.positions;
  for (const SizeKey& size : size_keys) read(object, size.key, config.*size.value, where);
  read(object, "rms_norm_eps", config.norm_eps, where);
  read(object, "tie_word_embeddings", config.tie_word_embeddings, where);
  read(object, "initializer_range", config.initializer_range, where);
  read_softcap(object, config, where);
  read_rope(object, config, where);
  for (const std::string& key : token_keys)
    if (object.contains(key)) config.token_ids[key] = json_text(object[key]);
  take_type(object, type, config, where);
  read_windows(object, type, config, where);
  config.check(Exit::bad_data, where);
  return config;
}

Config load_config(const std::string& path) {
  std::string ignored;
  Config config = parse_config(read_json(path), path, &ignored);
  if (!ignored.empty())
    std::fprintf(stderr, "note: %s: ignored, since nothing here depends on them: %s\n", printable(path).c_str(),
                 printable(ignored).c_str());
  std::fputs(note_idle_options(config, path).c_str(), stderr);
  return config;
}

namespace {

// The type of model that a plain LLaMA with these options is; null where there is none.
const ModelType* plain_type(const Config& c) {
  if (c.arch != "llama" || has_general_options(c) || (c.qk_norm && c.qk_norm_eps != c.norm_eps)) return nullptr;
  // Only without biases and norms can it be a Mistral, whose layers have all a window or none has.
  const bool windows = c.sliding_window > 0, mixed = windows && c.window_pattern.find('L') != std::string::npos;
  const std::string name = mixed ? "ministral" : windows || c.mistral ? "mistral" : "llama";
  const auto found = std::find_if(model_types.begin(), model_types.end(), [&](const ModelType& type) {
    if (type.qkv_bias != c.qkv_bias || type.qk_norm != c.qk_norm) return false;
    return c.qkv_bias || c.qk_norm || type.name == name;
  });
  return found == model_types.end() ? nullptr : &*found;
}

// The window in the words of each type; of a variant the same as Ministral's.
void write_window(json& object, const Config& c, const ModelType* type) {
  if (c.sliding_window > 0) object["sliding_window"] = c.sliding_window;
  else if (type != nullptr && type->window > 0) object["sliding_window"] = nullptr;
  if (type != nullptr && type->asks_window) object["use_sliding_window"] = c.sliding_window > 0;
  if (c.sliding_window == 0 || (type != nullptr && !type->lists_windows)) return;
  for (const char layer : c.window_pattern)
    object["layer_types"].push_back(layer == 'S' ? "sliding_attention" : "full_attention");
}

}  // namespace

json to_json(const Config& config) {
  if (config.gpt2()) return gpt2_json(config);
  const ModelType* type = plain_type(config);
  json object = R"({"hidden_act": "silu", "attention_bias": false, "mlp_bias": false, "attention_dropout": 0.0,
                    "torch_dtype": "float32", "dtype": "float32", "use_cache": true})"_json;
  object["rms_norm_eps"] = config.norm_eps;
  object["rope_theta"] = config.rope_theta;
  object["rope_parameters"] = rope_json(config);
  object["tie_word_embeddings"] = config.tie_word_embeddings;
  object["initializer_range"] = config.initializer_range;
  for (const SizeKey& size : size_keys) object[size.key] = config.*size.value;
  if (config.rope_scaling) object["rope_scaling"] = rope_json(config);  // the name that older readers know
  for (const auto& [key, value] : config.token_ids) object[key] = known_json(value);
  write_window(object, config, type);
  if (config.qkv_bias) object.erase("attention_bias");  // which would speak of the output's, too
  if (type == nullptr) {
    mark_as_variant(object, config);
    object["crossply"]["qk_norm"] = config.qk_norm;
    if (config.qk_norm) object["crossply"]["qk_norm_eps"] = config.qk_norm_eps;
    if (config.qkv_bias) object["crossply"]["qkv_bias"] = true;
  } else {
    object["model_type"] = type->name;
    object["architectures"] = json::array({type->architecture});
  }
  return object;
}

}  // namespace crossply
