#include "models/disk/library_files.h"

#include <nlohmann/json.hpp>

#include "engine/io/json.h"
#include "models/disk/config_json.h"
#include "models/disk/modelling_file.h"

namespace crossply {
namespace {

using nlohmann::json;

// "bos" and the like, and their ids. Padding, without which transformers makes no batches, is the word <pad>, or else
// the token that ends a text.
std::map<std::string, int32_t> special_tokens(const Tokenizer& tokenizer) {
  std::map<std::string, int32_t> special;
  if (tokenizer.prefix().size() == 1) special["bos"] = tokenizer.prefix()[0];
  if (tokenizer.eos() >= 0) special["eos"] = tokenizer.eos();
  if (tokenizer.eos() >= 0) special["pad"] = tokenizer.decode({0}) == "<pad>" ? 0 : tokenizer.eos();
  return special;
}

std::string tokenizer_config(const Tokenizer& tokenizer) {
  json object = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"clean_up_tokenization_spaces", false},
                 {"model_input_names", {"input_ids", "attention_mask"}},
                 {"padding_side", "left"}};  // what a model writes must stand after a token
  for (const auto& [name, id] : special_tokens(tokenizer)) object[name + "_token"] = tokenizer.decode({id});
  return json_text(object, 2) + "\n";
}

}  // namespace

std::map<std::string, std::string> library_files(const Config& config, const Tokenizer& tokenizer) {
  std::map<std::string, std::string> files;
  if (to_json(config).contains("auto_map")) files[modelling_module(config.arch) + ".py"] = modelling_file(config.arch);
  if (tokenizer.knows_texts()) files["tokenizer_config.json"] = tokenizer_config(tokenizer);
  json generation = json::object();
  for (const auto& [name, id] : special_tokens(tokenizer)) generation[name + "_token_id"] = id;
  for (const auto& [key, id] : config.token_ids) generation[key] = known_json(id);
  if (!generation.empty()) files["generation_config.json"] = json_text(generation, 2) + "\n";
  return files;
}

}  // namespace crossply
