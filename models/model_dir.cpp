#include "models/model_dir.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
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

void check_shape(const std::string& path, const TensorInfo& info, const Parameter& row) {
  if (info.shape != sizes_of(row.shape))
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

std::vector<NamedTensor> values_of(const ParameterTable& params) {
  std::vector<NamedTensor> values;
  for (const Parameter& row : params.rows()) values.push_back({row.name, row.value});
  return values;
}

std::vector<NamedTensor> gradients_of(const ParameterTable& params) {
  std::vector<NamedTensor> gradients;
  for (const Parameter& row : params.rows()) gradients.push_back({row.name, row.grad});
  return gradients;
}

void save_tensors(const std::string& path, const ParameterTable& params, const std::vector<NamedTensor>& tensors,
                  const std::map<std::string, std::string>& metadata) {
  const bool readable = params.device().stream().backend != Backend::cuda;  // by this program, where it is
  std::deque<std::vector<float>> copies;
  std::vector<TensorToWrite> to_write;
  for (const auto& [name, tensor] : tensors) {
    const bool as_it_is = readable && tensor.dtype == Dtype::f32;
    const float* data = as_it_is ? tensor.as<float>() : copies.emplace_back(params.read(tensor)).data();
    to_write.push_back({name, "F32", sizes_of(tensor.shape), data});
  }
  write_safetensors(path, to_write, metadata);
}

std::vector<std::string> save_weights(const CheckpointWriter& writer, const ParameterTable& params, int rank, int size,
                                      int64_t most) {
  std::vector<std::vector<NamedTensor>> shards(1);
  int64_t bytes = 0, total = 0;
  for (const NamedTensor& value : values_of(params)) {
    const int64_t more = value.tensor.numel() * static_cast<int64_t>(sizeof(float));
    if (size > 1 && !shards.back().empty() && bytes + more > most) shards.emplace_back(), bytes = 0;
    shards.back().push_back(value);
    bytes += more, total += more;
  }
  std::vector<std::string> written;
  const auto save = [&](const std::string& name, const std::vector<NamedTensor>& tensors) {
    save_tensors(writer.path(name), params, tensors);
    written.push_back(name);
  };
  const int n = static_cast<int>(shards.size());
  if (n == 1 && rank == 0) save("model.safetensors", shards[0]);
  if (n == 1) return written;
  nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", nlohmann::json::object()}};
  for (int i = 0; i < n; ++i) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", i + 1, n);
    for (const NamedTensor& tensor : shards[static_cast<size_t>(i)]) index["weight_map"][tensor.name] = name;
    if (i % size == rank) save(name, shards[static_cast<size_t>(i)]);
  }
  if (rank > 0) return written;
  written.push_back("model.safetensors.index.json");
  write_file_atomically(writer.path(written.back()), index.dump(2) + "\n");
  return written;
}

void save_config(const std::string& path, const Config& config) {
  write_file_atomically(path, to_json(config).dump(2) + "\n");
}

}  // namespace crossply
