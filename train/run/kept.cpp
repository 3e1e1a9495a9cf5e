#include "train/run/kept.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <vector>

#include "data/source.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"

namespace crossply {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

// 0: not known.
double words_per_token_of(const std::string& data) {
  const DataSpec::Kind kind = parse_data_spec(data).kind;
  if (kind != DataSpec::Kind::directory && kind != DataSpec::Kind::shards) return 0;
  const std::vector<std::string> shards = data_files(data);
  const std::string path = shards.empty() ? "" : (fs::path(shards[0]).parent_path() / "manifest.json").string();
  if (path.empty() || !path_exists(path)) return 0;
  const json manifest = read_json(path);
  const auto count = [&](const char* key) {
    const json number = manifest.is_object() ? manifest.value(key, json()) : json();
    return number.is_number_unsigned() ? number.get<double>() : 0;
  };
  return count("tokens") > 0 ? count("words") / count("tokens") : 0;
}

}  // namespace

KeptCheckpoints::KeptCheckpoints(const std::string& run_dir, const std::string& data)
    : path_(run_dir + "/kept.json"), data_(data), list_(json::array()) {
  if (!path_exists(path_)) return;
  list_ = read_json(path_).value("checkpoints", json());
  const auto is_ours = [](const json& entry) {
    return entry.is_object() && holds<int64_t>(entry.value("step", json()), 0);
  };
  if (!list_.is_array() || !std::all_of(list_.begin(), list_.end(), is_ours))
    fail(Exit::bad_data, path_, ": \"checkpoints\" is no list of {\"step\": NUMBER, ...}; mend it, for --keep ",
         "removes what it does not list");
  for (const json& entry : list_) steps_.insert(entry["step"].get<int64_t>());
}

void KeptCheckpoints::add(int64_t step, int64_t tokens) {
  if (!steps_.insert(step).second) return;
  json entry = {{"step", step}, {"tokens", tokens}};
  if (const double words = words_per_token_of(data_); words > 0)
    entry["words"] = std::llround(words * static_cast<double>(tokens));
  list_.push_back(entry);
  write_file_atomically(path_, json_text(json{{"checkpoints", list_}}, 2) + "\n");
}

}  // namespace crossply
