#include "models/model_dir.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "engine/printable.h"
#include "models/json_file.h"
#include "models/model.h"
#include "models/registry.h"

namespace crossply {
namespace {

struct Found {
  const SafetensorsFile* file;
  const TensorInfo* info;
};

std::vector<int64_t> sizes(const Shape& shape) { return {shape.dim.begin(), shape.dim.begin() + shape.rank}; }

void check_shape(const std::string& path, const TensorInfo& info, const Parameter& row) {
  if (info.shape != sizes(row.shape))
    fail(Exit::bad_data, path, ": ", info.str(), " does not fit the configuration, which makes it ", row.shape.str());
}

// The weight files of a directory: one, or those of the index.
std::deque<SafetensorsFile> open_weights(const std::string& dir) {
  std::deque<SafetensorsFile> files;
  const std::string single = dir + "/model.safetensors", index_path = single + ".index.json";
  if (path_exists(single) || !path_exists(index_path)) {
    files.emplace_back(single);
    return files;
  }
  const auto index = read_json(index_path);
  if (!index.contains("weight_map") || !index["weight_map"].is_object())
    fail(Exit::bad_data, index_path, ": \"weight_map\" is missing");
  std::set<std::string> names;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
      fail(Exit::bad_data, index_path, ": the file of ", excerpt(tensor), " is ", excerpt(file.dump()));
    names.insert(file.get<std::string>());
  }
  for (const std::string& name : names) files.emplace_back(dir + "/" + name);
  return files;
}

using Tensors = std::unordered_map<std::string, Found>;

// Every tensor by name. The files must hold exactly what the table declares.
Tensors find_tensors(const std::deque<SafetensorsFile>& files, const Config& config, ParameterTable& params) {
  Tensors found;
  for (const SafetensorsFile& file : files) {
    for (const TensorInfo& info : file.tensors()) {
      const bool tied_head = config.tie_word_embeddings && info.name == "lm_head.weight";
      const bool rope_buffer = info.name.ends_with(".rotary_emb.inv_freq");  // old exports store this constant
      if (tied_head || rope_buffer) continue;
      if (!params.contains(info.name))
        fail(Exit::bad_data, file.path(), ": tensor ", info.str(), " is not part of a ", config.arch,
             " model with this config.json");
      check_shape(file.path(), info, params.at(info.name));
      if (!found.emplace(info.name, Found{&file, &info}).second)
        fail(Exit::bad_data, file.path(), ": tensor ", info.str(), " is in two files");
    }
  }
  for (const Parameter& row : params.rows())
    if (!found.contains(row.name))
      fail(Exit::bad_data, files.front().path(), ": tensor \"", row.name, "\" ", row.shape.str(), " is missing");
  return found;
}

void read_row(const Found& source, ParameterTable& params, const Parameter& row) {
  std::vector<double> host(static_cast<size_t>(row.shape.numel()));
  source.file->read_f64(*source.info, host.data());
  const auto bad = std::find_if(host.begin(), host.end(), [](double weight) { return !std::isfinite(weight); });
  if (bad != host.end())
    fail(Exit::bad_data, source.file->path(), ": tensor ", source.info->str(), " holds ", *bad, " at its element ",
         bad - host.begin(), "; no model can be run with that");
  params.write(row, host.data());
}

}  // namespace

void load_weights(const std::string& dir, const Config& config, ParameterTable& params) {
  const std::deque<SafetensorsFile> files = open_weights(dir);
  const Tensors found = find_tensors(files, config, params);
  for (const Parameter& row : params.rows()) read_row(found.at(row.name), params, row);
}

void load_initial_weights(const std::string& dir, const Config& source, const Config& config, ParameterTable& params) {
  const std::deque<SafetensorsFile> files = open_weights(dir);
  ParameterTable theirs;
  declare_model(theirs, source);
  const Tensors found = find_tensors(files, source, theirs);
  const auto connection = find_architecture(config.arch).make(config);
  std::vector<std::pair<const Parameter*, const Found*>> taken;
  for (const Parameter& row : params.rows()) {
    const auto it = found.find(source.arch == config.arch ? row.name : connection->llama_name(row.name));
    if (it == found.end()) continue;
    check_shape(it->second.file->path(), *it->second.info, row);
    taken.emplace_back(&row, &it->second);
  }
  for (const auto& [row, tensor] : taken) read_row(*tensor, params, *row);
}

void save_tensors(const std::string& path, const ParameterTable& params, const std::vector<RowTensors>& arrays,
                  const std::map<std::string, std::string>& metadata) {
  const bool readable = params.device().stream().backend != Backend::cuda;  // by this program, where it is
  std::deque<std::vector<float>> copies;
  std::vector<TensorToWrite> tensors;
  for (const RowTensors& array : arrays) {
    for (const Parameter& row : params.rows()) {
      const Tensor tensor = array.of(row);
      const bool as_it_is = readable && tensor.dtype == Dtype::f32;
      const float* data = as_it_is ? tensor.as<float>() : copies.emplace_back(params.read(tensor)).data();
      tensors.push_back({array.prefix + row.name, "F32", sizes(row.shape), data});
    }
  }
  write_safetensors(path, tensors, metadata);
}

void load_tensors(const std::string& path, ParameterTable& params, const std::vector<RowTensors>& arrays) {
  const SafetensorsFile file(path);
  if (file.tensors().size() != arrays.size() * params.rows().size())
    fail(Exit::bad_data, path, ": ", file.tensors().size(), " tensors, expected ",
         arrays.size() * params.rows().size());
  std::vector<float> host;
  for (const RowTensors& array : arrays) {
    for (const Parameter& row : params.rows()) {
      const TensorInfo* info = file.find(array.prefix + row.name);
      if (info == nullptr) fail(Exit::bad_data, path, ": tensor \"", array.prefix, row.name, "\" is missing");
      check_shape(path, *info, row);
      host.resize(static_cast<size_t>(row.shape.numel()));
      file.read_f32(*info, host.data());
      params.device().copy_in(array.of(row).as<float>(), host.data(), host.size() * sizeof(float));
    }
  }
}

void save_config(const std::string& path, const Config& config) {
  write_file_atomically(path, to_json(config).dump(2) + "\n");
}

}  // namespace crossply
