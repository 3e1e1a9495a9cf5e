#include "models/disk/model_dir.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <unordered_map>

#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "models/combined.h"
#include "models/disk/config_json.h"
#include "models/disk/file_layout.h"
#include "models/disk/modelling_file.h"
#include "models/model.h"

namespace crossply {
namespace {

// Where a row is in a file: in a tensor of `outputs`, from `begin` on.
struct Found {
  const SafetensorsFile* file;
  const TensorInfo* info;
  Shape shape;  // of the row
  int64_t begin = 0, outputs = 0;
  bool transposed = false;
};

[[noreturn]] void refuse_shape(const Found& found, const Shape& shape) {
  fail(Exit::bad_data, found.file->path(), ": ", found.info->str(), " does not fit the configuration, which makes it ",
       shape.str());
}

// Weights that PyTorch has pickled are never read: loading a pickle runs what is in it.
void refuse_pickle(const std::string& dir) {
  std::error_code error;
  for (std::filesystem::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    if (!name.starts_with("pytorch_model") || !name.ends_with(".bin")) continue;
    fail(Exit::no_input, printable(it->path().string()),
         ": weights in PyTorch's own format are not read, only model.safetensors. To convert them: python3 -c \"import "
         "glob, sys, torch, safetensors.torch as s; s.save_file({k: v.contiguous().clone() for f in "
         "glob.glob(sys.argv[1] + '/pytorch_model*.bin') for k, v in torch.load(f, map_location='cpu', "
         "weights_only=True).items()}, sys.argv[1] + '/model.safetensors', {'format': 'pt'})\" ",
         shell_word(dir));
  }
}

// The weight files of a directory: one, or those of the index.
std::deque<SafetensorsFile> open_weights(const std::string& dir) {
  std::deque<SafetensorsFile> files;
  const std::string single = dir + "/model.safetensors", index_path = single + ".index.json";
  if (!path_exists(single) && !path_exists(index_path)) refuse_pickle(dir);
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
      fail(Exit::bad_data, index_path, ": the file of ", excerpt(tensor), " is ", excerpt(json_text(file)));
    names.insert(file.get<std::string>());
  }
  for (const std::string& name : names) files.emplace_back(dir + "/" + name);
  return files;
}

// A tensor by its name in file_layout; null where no file has it.
struct Stored {
  const SafetensorsFile* file = nullptr;
  const TensorInfo* info = nullptr;
};
Stored find_stored(const std::deque<SafetensorsFile>& files, const std::string& name, const Config& config) {
  for (const SafetensorsFile& file : files)
    for (const TensorInfo& info : file.tensors())
      if (file_name(info.name, config) == name) return {&file, &info};
  return {};
}

// Compares a piece at a time: an embedding may be larger than what memory has room for twice.
bool same_values(const Stored& a, const Stored& b) {
  if (a.info->shape != b.info->shape) return false;
  const int64_t numel = a.info->numel(), piece = std::min<int64_t>(numel, 1 << 20);
  std::vector<double> x(static_cast<size_t>(piece)), y(x.size());
  for (int64_t i = 0; i < numel; i += piece) {
    const int64_t n = std::min(piece, numel - i);
    a.file->read_f64(*a.info, i, n, x.data());
    b.file->read_f64(*b.info, i, n, y.data());
    if (!std::equal(x.begin(), x.begin() + n, y.begin())) return false;
  }
  return true;
}

// A head that differs from the embedding although the configuration ties the two; null where there is none.
Stored untied_head(const std::deque<SafetensorsFile>& files, const Config& config) {
  if (!config.tie_word_embeddings) return {};
  const Stored head = find_stored(files, "lm_head.weight", config);
  const Stored embedding =
      find_stored(files, config.gpt2() ? "transformer.wte.weight" : "model.embed_tokens.weight", config);
  const bool differs = head.info != nullptr && embedding.info != nullptr && !same_values(head, embedding);
  return differs ? head : Stored{};
}

std::vector<double> numbers_of(const SafetensorsFile& file, const TensorInfo& info) {
  std::vector<double> numbers(static_cast<size_t>(info.numel()));
  if (info.dtype != "U8" && info.dtype != "BOOL") {
    file.read_f64(info, numbers.data());
    return numbers;
  }
  std::vector<uint8_t> raw(numbers.size());
  file.read_raw(info, info.dtype, raw.data());
  return {raw.begin(), raw.end()};
}

// A GPT-2's causal mask (1, 1, P, P): each token sees itself and those before it.
bool is_causal(const std::vector<double>& mask) {
  const auto P = static_cast<size_t>(std::llround(std::sqrt(static_cast<double>(mask.size()))));
  for (size_t i = 0; i < mask.size(); ++i)
    if ((mask[i] != 0) != (i % P <= i / P)) return false;
  return P * P == mask.size();
}

// RoPE's frequencies in the precision of the file; older programs stored them without their scaling.
bool is_rotation(const std::vector<double>& stored, Config config) {
  const auto close = [](double a, double b) { return std::abs(a - b) <= 1e-2 * b + 1e-6; };
  const auto equals = [&](const std::vector<double>& w) {
    return std::equal(stored.begin(), stored.end(), w.begin(), w.end(), close);
  };
  const bool scaled = equals(config.rope_frequencies());
  config.rope_scaling.reset();
  return scaled || equals(config.rope_frequencies());
}

// Older exports hold constants, which the model computes itself. Others than it computes would change it.
void check_constant(const SafetensorsFile& file, const TensorInfo& info, const Config& config) {
  const bool mask = info.name.ends_with(".attn.bias"), rotation = info.name.ends_with(".rotary_emb.inv_freq");
  if ((mask && !is_causal(numbers_of(file, info))) || (rotation && !is_rotation(numbers_of(file, info), config)))
    fail(Exit::bad_data, file.path(), ": tensor ", info.str(), " is not ",
         mask ? "the causal mask" : "the rotary frequencies of config.json", ", which is what is computed here");
}

using Rows = std::unordered_map<std::string, Found>;

// Every row by name. The files must hold exactly what the table declares.
Rows find_rows(const std::deque<SafetensorsFile>& files, const Config& config, const ParameterTable& params) {
  const std::vector<FileTensor> layout = file_layout(params, config);
  std::unordered_map<std::string, const FileTensor*> known;
  for (const FileTensor& tensor : layout) known[tensor.name] = &tensor;
  if (const Stored head = untied_head(files, config); head.info != nullptr)
    fail(Exit::bad_data, head.file->path(), ": tensor ", head.info->str(),
         " differs from the embedding, but config.json ties the two; set tie_word_embeddings to false");
  Rows found;
  for (const SafetensorsFile& file : files) {
    for (const TensorInfo& info : file.tensors()) {
      if (is_no_row(info.name, config)) {
        check_constant(file, info, config);
        continue;
      }
      const auto it = known.find(file_name(info.name, config));
      if (it == known.end())
        fail(Exit::bad_data, file.path(), ": tensor ", info.str(), " is not part of a ", config.arch,
             " model with this config.json");
      const FileTensor& tensor = *it->second;
      Found at{&file, &info, {}, 0, tensor.shape[tensor.shape.rank - 1], tensor.transposed};
      if (info.shape != sizes_of(tensor.shape)) refuse_shape(at, tensor.shape);
      for (const Parameter* row : tensor.rows) {
        at.shape = row->shape;
        if (const auto [first, fresh] = found.emplace(row->name, at); !fresh)
          fail(Exit::bad_data, file.path(), ": tensor ", info.str(), " is the same as ", first->second.info->str(),
               " in ", first->second.file->path(), "; remove one of them");
        at.begin += row->shape[0];
      }
    }
  }
  for (const FileTensor& tensor : layout)
    if (!found.contains(tensor.rows[0]->name))
      fail(Exit::bad_data, files.front().path(), ": tensor \"", tensor.name, "\" ", tensor.shape.str(), " is missing");
  return found;
}

// The row's numbers out of its tensor's.
std::vector<double> part_of(const std::vector<double>& tensor, const Found& at) {
  std::vector<double> part(static_cast<size_t>(at.shape.numel()));
  const int64_t inputs = at.transposed ? at.shape[1] : 1;
  for (int64_t o = 0; o < at.shape[0]; ++o)
    for (int64_t i = 0; i < inputs; ++i)
      part[static_cast<size_t>(o * inputs + i)] = tensor[static_cast<size_t>(i * at.outputs + at.begin + o)];
  return part;
}

std::vector<double> read_tensor(const Found& source, Dtype dtype) {
  const std::vector<int64_t>& shape = source.info->shape;
  std::vector<double> host(
      static_cast<size_t>(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>())));
  source.file->read_f64(*source.info, host.data());
  const bool in_f32 = dtype != Dtype::f64;
  const auto bad = std::find_if(host.begin(), host.end(), [&](double weight) {
    return !std::isfinite(in_f32 ? static_cast<double>(static_cast<float>(weight)) : weight);
  });
  if (bad == host.end()) return host;
  // What is not finite itself comes first, wherever in the tensor it is.
  const auto worst = std::find_if(bad, host.end(), [](double weight) { return !std::isfinite(weight); });
  const auto named = worst != host.end() ? worst : bad;
  fail(Exit::bad_data, source.file->path(), ": tensor ", source.info->str(), " holds ", *named, " at its element ",
       named - host.begin(), worst != host.end() ? "; no model can be run with that" : ", which is too large for fp32");
}

// Fills rows from where they are; a tensor of several rows is read once.
void read_rows(ParameterTable& params, std::vector<std::pair<const Parameter*, const Found*>> rows) {
  std::stable_sort(rows.begin(), rows.end(),
                   [](const auto& a, const auto& b) { return std::less<>()(a.second->info, b.second->info); });
  std::vector<double> host;
  const TensorInfo* read = nullptr;
  for (const auto& [row, found] : rows) {
    if (found->info != read) host = read_tensor(*found, params.dtype()), read = found->info;
    const bool whole = found->shape.numel() == std::ssize(host) && !found->transposed;
    params.write(*row, whole ? host.data() : part_of(host, *found).data());
  }
}

// Of a plain model that becomes another architecture: every row must have come along, but those of blocks that are left
// out. Without one the model would not start as the plain one.
void require_all_taken(const Rows& found, const std::vector<std::pair<const Parameter*, const Found*>>& taken,
                       const Config& config) {
  std::set<const Found*> used;
  for (const auto& [row, source] : taken) used.insert(source);
  for (const auto& [name, source] : found) {
    const std::string blocks = "model.layers.";
    const bool left_out =
        name.starts_with(blocks) && std::stoll(name.substr(blocks.size())) >= config.num_hidden_layers;
    if (!left_out && !used.contains(&source))
      fail(Exit::usage, source.file->path(), ": tensor ", source.info->str(), " has no place in a ", config.arch);
  }
}

}  // namespace

Config load_model_config(const std::string& dir) {
  Config config = load_config(dir + "/config.json");
  const std::string single = dir + "/model.safetensors";
  if (!config.tie_word_embeddings || !(path_exists(single) || path_exists(single + ".index.json"))) return config;
  const std::deque<SafetensorsFile> files = open_weights(dir);
  const Stored head = untied_head(files, config);
  if (head.info == nullptr) return config;
  std::fprintf(stderr,
               "note: %s: lm_head.weight differs from the embedding, so it is used, although config.json says "
               "tie_word_embeddings true\n",
               printable(head.file->path()).c_str());
  config.tie_word_embeddings = false;
  return config;
}

void load_weights(const std::string& dir, const Config& config, ParameterTable& params) {
  const std::deque<SafetensorsFile> files = open_weights(dir);
  const Rows found = find_rows(files, config, params);
  std::vector<std::pair<const Parameter*, const Found*>> taken;
  for (const Parameter& row : params.rows()) taken.emplace_back(&row, &found.at(row.name));
  read_rows(params, std::move(taken));
}

void load_initial_weights(const std::string& dir, const Config& source, const Config& config, ParameterTable& params) {
  const std::deque<SafetensorsFile> files = open_weights(dir);
  ParameterTable theirs;
  declare_model(theirs, source);
  const Rows found = find_rows(files, source, theirs);
  const auto name_there = names_beside(source.arch, config);
  std::vector<std::pair<const Parameter*, const Found*>> taken;
  for (const Parameter& row : params.rows()) {
    const auto it = found.find(name_there(row.name));
    if (it == found.end()) continue;
    if (it->second.shape != row.shape) refuse_shape(it->second, row.shape);
    taken.emplace_back(&row, &it->second);
  }
  if (source.arch != config.arch) require_all_taken(found, taken, config);
  read_rows(params, std::move(taken));
}

namespace {

std::vector<NamedTensor> named(const ParameterTable& params, const Config& config, Tensor Parameter::*which) {
  std::vector<NamedTensor> named;
  for (const FileTensor& tensor : file_layout(params, config)) {
    named.push_back({tensor.name, tensor.shape, {}, tensor.transposed});
    for (const Parameter* row : tensor.rows) named.back().parts.push_back(row->*which);
  }
  return named;
}

// A tensor's numbers as they stand in a file.
std::vector<float> assemble(const ParameterTable& params, const NamedTensor& tensor) {
  if (tensor.parts.size() == 1 && !tensor.transposed) return params.read(tensor.parts[0]);
  std::vector<float> all(static_cast<size_t>(tensor.shape.numel()));
  const int64_t outputs = tensor.shape[tensor.shape.rank - 1], inputs = tensor.shape.numel() / outputs;
  int64_t begin = 0;
  for (const Tensor& part : tensor.parts) {
    const std::vector<float> host = params.read(part);
    const int64_t own = part.dim(0);
    for (int64_t o = 0; o < own; ++o)
      for (int64_t i = 0; i < inputs; ++i)
        all[static_cast<size_t>(i * outputs + begin + o)] = host[static_cast<size_t>(o * inputs + i)];
    begin += own;
  }
  return all;
}

}  // namespace

std::vector<NamedTensor> values_of(const ParameterTable& params, const Config& config) {
  return named(params, config, &Parameter::value);
}

std::vector<NamedTensor> gradients_of(const ParameterTable& params, const Config& config) {
  return named(params, config, &Parameter::grad);
}

void require_finite(const ParameterTable& params, const std::vector<NamedTensor>& tensors, Exit code) {
  for (const NamedTensor& tensor : tensors) {
    const std::vector<float> host = assemble(params, tensor);
    const auto bad = std::find_if(host.begin(), host.end(), [](float number) { return !std::isfinite(number); });
    if (bad != host.end())
      fail(code, "tensor \"", tensor.name, "\" ", tensor.shape.str(), " has ", *bad, " at its element ",
           bad - host.begin(), " in fp32; nothing was written");
  }
}

void save_tensors(const std::string& path, const ParameterTable& params, const std::vector<NamedTensor>& tensors,
                  const std::map<std::string, std::string>& metadata) {
  const bool readable = params.device().stream().backend != Backend::cuda;  // by this program, where it is
  std::deque<std::vector<float>> copies;
  std::vector<TensorToWrite> to_write;
  for (const NamedTensor& tensor : tensors) {
    const Tensor& first = tensor.parts[0];
    const bool as_it_is = readable && first.dtype == Dtype::f32 && tensor.parts.size() == 1 && !tensor.transposed;
    const float* data = as_it_is ? first.as<float>() : copies.emplace_back(assemble(params, tensor)).data();
    to_write.push_back({tensor.name, "F32", sizes_of(tensor.shape), data});
  }
  write_safetensors(path, to_write, metadata);
}

std::vector<std::string> save_weights(const CheckpointWriter& writer, const ParameterTable& params,
                                      const Config& config, int rank, int size, int64_t most) {
  std::vector<std::vector<NamedTensor>> shards(1);
  int64_t bytes = 0, total = 0;
  for (const NamedTensor& value : values_of(params, config)) {
    const int64_t more = value.shape.numel() * static_cast<int64_t>(sizeof(float));
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
  write_file_atomically(writer.path(written.back()), json_text(index, 2) + "\n");
  return written;
}

void save_config(const std::string& path, const Config& config) {
  write_file_atomically(path, json_text(to_json(config), 2) + "\n");
}

namespace {

// The text of config.json, with the keys by which transformers finds the modelling file. It stays as it is where they
// are there.
std::string config_with_modelling_file(const std::string& path, const nlohmann::json& ours) {
  constexpr uint64_t max_config = 64 << 20;
  const std::string text = read_file(path, max_config);
  auto config = parse_json<nlohmann::ordered_json>(text, path);
  const auto names_ours = [&](const auto& entry) {
    const auto found = config.find("auto_map");
    return found != config.end() && found->is_object() && found->contains(entry.key()) &&
           (*found)[entry.key()] == entry.value();
  };
  const auto& wanted = ours.at("auto_map").items();
  if (std::all_of(wanted.begin(), wanted.end(), names_ours)) return text;
  for (const char* key : {"model_type", "architectures", "auto_map"}) config[key] = ours[key];
  return json_text(config, 2) + "\n";
}

}  // namespace

std::vector<std::string> refresh_model_dir(const std::string& dir) {
  const std::string config_path = dir + "/config.json";
  const Config config = load_config(config_path);
  const nlohmann::json ours = to_json(config);
  if (const std::string why = without_modelling_file(config); !why.empty()) fail(Exit::usage, dir, ": ", why);
  std::vector<std::string> archs = modelling_files_in(dir);
  const bool needs_one = ours.contains("auto_map");
  if (needs_one && std::find(archs.begin(), archs.end(), config.arch) == archs.end()) archs.push_back(config.arch);
  NamedContents files;
  for (const std::string& arch : archs) files.emplace_back(modelling_module(arch) + ".py", modelling_file(arch));
  if (needs_one) files.emplace_back("config.json", config_with_modelling_file(config_path, ours));
  return replace_files(dir, std::move(files));
}

}  // namespace crossply
