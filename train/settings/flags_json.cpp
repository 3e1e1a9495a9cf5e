// A run's settings as JSON, in the flags' own words: what flags.json holds, what a checkpoint keeps of it, and back.
#include <algorithm>
#include <filesystem>

#include "engine/io/byte_names.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "models/disk/config_json.h"
#include "train/settings/flag_table.h"
#include "train/settings/setting_io.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Calls visit(row, member) for the rows up to this class that are kept, one after the other: whether a row is may
// depend on what the visit of an earlier one has set.
template <class Visit>
void each_kept(Settings& settings, Resume last, Visit&& visit) {
  for (const FlagGroup& group : training_flags())
    for (const FlagRow& row : group.rows)
      if (row.resume <= last && (row.kept_if == nullptr || row.kept_if(settings)))
        std::visit([&](auto* member) { visit(row, *member); }, row.member(settings));
}

// A text as this program has it, from any directory; older runs have paths as they were typed, and another name.
std::string renewed(const FlagRow& row, const std::string& text) {
  if (row.flag == "--schedule" && text == "cosine1") return "cosine_to_floor";
  if (row.takes.text == "FILE" || row.takes.text == "DIR") return absolute_path(text);
  return row.takes.text == "SOURCE" || row.takes.text == "GLOB" ? absolute_data(text) : text;
}

// What is kept of the settings, up to this class.
json kept(const Settings& s, Resume last) {
  json settings;
  Settings all = s;
  each_kept(all, last, [&]<class T>(const FlagRow& row, const T& member) {
    if constexpr (std::is_same_v<T, std::string>) PutSetting{settings}(row.key().c_str(), renewed(row, member));
    else PutSetting{settings}(row.key().c_str(), member);
  });
  return settings;
}

// Takes one setting out of flags.json, where older runs do not have all.
struct TakeKept {
  json settings;
  const std::string& path;

  template <class T>
  void operator()(const FlagRow& row, T& member) {
    const std::string key = row.key();
    const TakeSetting take{settings, path};
    const double min = row.resume == Resume::may_grow ? std::max(1.0, row.takes.min) : row.takes.min;
    if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, double>)
      take(key.c_str(), member, min, row.takes.max);
    else if constexpr (std::is_same_v<T, std::string>) {
      if (settings.contains(key) && settings[key].is_string())
        settings[key] = name_as_utf8(renewed(row, name_from_utf8(settings[key])));
      if (row.takes.words.empty()) take(key.c_str(), member);
      else take(key.c_str(), member, row.takes.words);
    } else if constexpr (!std::is_same_v<T, std::vector<std::string>>) {
      take(key.c_str(), member);  // the seed may be any
    }
  }
};

// For a message.
std::string shown(const json& value) {
  return value.is_string() ? "\"" + name_from_utf8(value) + "\"" : json_text(value);
}

}  // namespace

std::string absolute_path(const std::string& path) {
  std::error_code error;
  const fs::path full = fs::absolute(path, error);
  return path.empty() || error ? path : full.string();
}

std::string absolute_data(const std::string& spec) {
  const DataSpec parts = parse_data_spec(spec);
  if (parts.path.empty()) return spec;
  const std::string full = absolute_path(parts.path), before = full.substr(0, full.size() - parts.path.size());
  // A directory whose own name reads as a pattern would change what the glob finds.
  const auto is_pattern = [](const std::string& text) { return text.find_first_of("*?[\\") != text.npos; };
  if (is_pattern(parts.path) && is_pattern(before)) return spec;
  // A dot is left out; what two of them leave may be a link.
  return parts.prefix + (full.find("/../") == full.npos ? fs::path(full).lexically_normal().string() : full);
}

json trajectory(const Settings& s) { return kept(s, Resume::may_grow); }

json all_settings(const Settings& s) {
  json settings = kept(s, Resume::free);
  settings["config"] = to_json(s.config);
  return settings;
}

json read_run_settings(const std::string& run_dir) {
  const std::string path = run_dir + "/flags.json";
  return !run_dir.empty() && path_exists(path) ? read_json(path) : json();
}

void take_settings(const json& settings, const std::string& path, Settings& s) {
  if (!settings.is_object() || !settings.contains("config")) fail(Exit::bad_data, path, ": \"config\" is missing");
  if (!settings.contains("eval_rule")) s.eval_rule = "first";  // older runs had no other
  each_kept(s, Resume::free, TakeKept{settings, path});
  s.config = parse_config(settings["config"], path + ": config");
}

bool take_run_settings(const std::string& run_dir, Settings& o) {
  const json settings = read_run_settings(run_dir);
  if (settings.is_null()) return false;
  const std::string arch = o.config.arch;
  take_settings(settings, run_dir + "/flags.json", o);
  if (o.config.arch != arch)
    fail(Exit::usage, "--resume: the run in ", run_dir, " is of train_", o.config.arch, ", not of train_", arch);
  return true;
}

void refuse_other_settings(const json& saved, const Settings& now, const std::string& where,
                           const std::set<std::string>& moved) {
  if (!saved.is_object()) fail(Exit::bad_data, where, ": the flags of the run are missing");
  static const json usual = trajectory(Settings());  // for what older runs had no choice of
  const json current = trajectory(now);
  Settings settings = now;
  each_kept(settings, Resume::may_grow, [&](const FlagRow& row, const auto&) {
    const std::string key = row.key();
    const json &value = current[key], found = saved.value(key, usual.value(key, json()));
    const json was = found.is_string() ? json(name_as_utf8(renewed(row, name_from_utf8(found)))) : found;
    if (was == value || moved.contains(key) || (key == "init" && now.init_moved)) return;
    if (row.resume == Resume::may_grow && was.is_number_unsigned() && was < value) return;
    const bool teacher = key == "teacher" && was != "" && value != "";
    fail(Exit::usage, "--resume: the run in ", where, " has ", row.flag, " ", shown(was), ", the flags say ",
         shown(value),
         row.resume == Resume::may_grow ? "; it can only grow"
         : data_settings.contains(key)  ? "; only other files with the same contents can take its place"
         : teacher                      ? "; only a directory with the same weights can take its place"
                                        : "; resume with the flags it was started with");
  });
}

void refuse_other_config(const Config& saved, const Config& now, const std::string& where) {
  const json was = to_json(saved).flatten(), is = to_json(now).flatten();
  if (was == is) return;
  std::string differences;
  for (const auto& [key, value] : is.items()) {
    const json old = was.value(key, json());
    if (old != value) differences += str(" ", key.substr(1), " is ", json_text(old), ", not ", json_text(value), ";");
  }
  fail(Exit::usage, "--resume: ", where, " is of another model than the flags describe:", differences,
       " resume with the flags it was started with");
}

}  // namespace crossply
