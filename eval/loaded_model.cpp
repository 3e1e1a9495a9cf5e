#include "eval/loaded_model.h"

#include <algorithm>

#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "kernels/devices.h"
#include "models/disk/model_dir.h"

namespace crossply {
namespace {

// One id or a list of them, without what is none of the vocabulary.
std::vector<int32_t> ids_of(const nlohmann::json& value, int64_t V) {
  std::vector<int32_t> ids;
  for (const auto& id : value.is_array() ? value : nlohmann::json::array({value}))
    if (id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(V)) ids.push_back(id.get<int32_t>());
  return ids;
}

}  // namespace

LoadedModel::LoadedModel(const std::string& path, const std::string& device_name, bool with_gradients,
                         const std::string& matmul)
    : source(path), dir(source.path()), config(load_model_config(dir)), device(make_device(device_name, matmul)) {
  declare_model(params, config);
  params.allocate(*device, device_name == "reference" ? Dtype::f64 : Dtype::f32, with_gradients);
  load_weights(dir, config, params);
}

Tokenizer model_tokenizer(const LoadedModel& model, const std::string& path) {
  const Tokenizer own = Tokenizer::load(model.dir);
  const auto check_size = [&](const Tokenizer& tokenizer, const std::string& where) {
    if (tokenizer.vocab_size() > model.config.vocab_size)
      fail(Exit::bad_data, where, ": the tokenizer has ", tokenizer.vocab_size(),
           " tokens, but the model's vocabulary has only ", model.config.vocab_size, ": it is another model's");
  };
  check_size(own, model.dir);
  if (path.empty()) return own;
  const Tokenizer given = Tokenizer::read(path);
  if (own.knows_texts() && !(own == given))
    fail(Exit::usage, "--tokenizer ", path, " is ", given.describe(), ", but ", model.dir, " has ", own.describe(),
         "; leave out --tokenizer");
  check_size(given, path);
  return given;
}

std::vector<int32_t> token_ids(const Config& config, const std::string& key) {
  const auto found = config.token_ids.find(key);
  if (found == config.token_ids.end()) return {};
  return ids_of(known_json(found->second), config.vocab_size);
}

std::vector<int32_t> ending_tokens(const LoadedModel& model, const Tokenizer& tokenizer) {
  std::vector<int32_t> ends = token_ids(model.config, "eos_token_id");
  if (tokenizer.eos() >= 0) ends.push_back(tokenizer.eos());
  const std::string path = model.dir + "/generation_config.json";
  if (!path_exists(path)) return ends;
  const nlohmann::json generation = read_json(path);
  const std::vector<int32_t> more = ids_of(generation.value("eos_token_id", nlohmann::json()), model.config.vocab_size);
  ends.insert(ends.end(), more.begin(), more.end());
  return ends;
}

int32_t beginning_token(const LoadedModel& model, const Tokenizer& tokenizer) {
  if (!tokenizer.prefix().empty()) return tokenizer.prefix()[0];
  if (tokenizer.eos() >= 0) return tokenizer.eos();
  for (const char* key : {"bos_token_id", "eos_token_id"})
    if (const std::vector<int32_t> ids = token_ids(model.config, key); !ids.empty()) return ids[0];
  return -1;
}

std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const std::string& text) {
  std::vector<int32_t> ids = tokenizer.encode(text);
  const std::vector<int32_t>& prefix = tokenizer.prefix();
  if (ids.size() < prefix.size() || !std::equal(prefix.begin(), prefix.end(), ids.begin()))
    ids.insert(ids.begin(), prefix.begin(), prefix.end());
  return ids;
}

}  // namespace crossply
