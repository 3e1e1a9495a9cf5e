// A run's settings as JSON, in the flags' own words: what flags.json holds, what a checkpoint keeps of it, and back.
#include <algorithm>
#include <filesystem>

#include "data/document_marks.h"
#include "engine/io/byte_names.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "models/combined.h"
#include "models/disk/config_json.h"
#include "train/settings/flag_table.h"
#include "train/settings/setting_io.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Classes {
  Resume first, last;
};
constexpr Classes of_trajectory = {Resume::fixed, Resume::may_grow}, of_run = {Resume::fixed, Resume::free},
                  of_call = {Resume::this_call, Resume::this_call};

// Calls visit(row, member) for the rows of these classes that are kept, one after the other: whether a row is may
// depend on what the visit of an earlier one has set.
template <class Visit>
void each_kept(Settings& settings, Classes classes, Visit&& visit) {
  for (const FlagGroup& group : training_flags())
    for (const FlagRow& row : group.rows)
      if (row.resume >= classes.first && row.resume <= classes.last &&
          (row.kept_if == nullptr || row.kept_if(settings)))
        std::visit([&](auto* member) { visit(row, *member); }, row.member(settings));
}

// A text as this program has it, from any directory; older runs have paths as they were typed, and another name.
std::string renewed(const FlagRow& row, const std::string& text) {
  if (row.resume == Resume::this_call) return text;  // it goes no farther than to processes in this directory
  if (row.flag == "--schedule" && text == "cosine1") return "cosine_to_floor";
  if (row.takes.text == "FILE" || row.takes.text == "DIR") return absolute_path(text);
  return row.takes.text == "SOURCE" || row.takes.text == "GLOB" ? absolute_data(text) : text;
}

json kept(Settings settings, Classes classes) {
  json saved;
  each_kept(settings, classes, [&]<class T>(const FlagRow& row, const T& member) {
    if constexpr (std::is_same_v<T, std::string>) PutSetting{saved}(row.key().c_str(), renewed(row, member));
    else PutSetting{saved}(row.key().c_str(), member);
  });
  return saved;
}

// Takes one setting out of flags.json, where older runs do not have all.
struct TakeKept {
  json saved;
  const std::string& path;

  template <class T>
  void operator()(const FlagRow& row, T& member) {
    const std::string key = row.key();
    const TakeSetting take{saved, path};
    const double min = row.resume == Resume::may_grow ? std::max(1.0, row.takes.min) : row.takes.min;
    if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, double>)
      take(key.c_str(), member, min, row.takes.max);
    else if constexpr (std::is_same_v<T, std::string>) {
      if (saved.contains(key) && saved[key].is_string())
        saved[key] = name_as_utf8(renewed(row, name_from_utf8(saved[key])));
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

json trajectory(const Settings& settings) { return kept(settings, of_trajectory); }

json all_settings(const Settings& settings) {
  json saved = kept(settings, of_run);
  saved["config"] = to_json(settings.config);
  if (!settings.branch.run.empty())
    saved["branch"] = {{"run", name_as_utf8(absolute_path(settings.branch.run))}, {"step", settings.branch.step}};
  return saved;
}

json call_settings(const Settings& settings) {
  static const json usual = kept(Settings(), of_call);
  json saved = kept(settings, of_call);
  for (const auto& [key, value] : usual.items())
    if (saved[key] == value) saved.erase(key);
  return saved;
}

json settings_of_all_ranks(const Settings& settings) {
  json all = all_settings(settings);
  all.update(kept(settings, of_call));
  for (const FlagGroup& group : training_flags())
    for (const FlagRow& row : group.rows)
      if (row.per_rank) all.erase(row.key());
  return all;
}

json read_run_settings(const std::string& run_dir) {
  const std::string path = run_dir + "/flags.json";
  return !run_dir.empty() && path_exists(path) ? read_json(path) : json();
}

std::string continued_run(const Settings& settings) {
  const std::string run = settings.resume ? settings.out : settings.branch.run;
  return read_run_settings(run).is_null() ? "" : run;
}

void take_settings(const json& saved, const std::string& path, Settings& settings) {
  if (!saved.is_object() || !saved.contains("config")) fail(Exit::bad_data, path, ": \"config\" is missing");
  if (!saved.contains("eval_rule")) settings.eval_rule = "first";  // older runs had no other
  each_kept(settings, of_run, TakeKept{saved, path});
  if (mark_shuffle_alone(saved)) {
    if (settings.data.shuffle == "documents" && settings.data.documents != "auto")
      fail(Exit::usage, path, ": the run began with --documents ", settings.data.documents,
           " when that was for --shuffle documents alone; go on with the program that began it");
    settings.data.documents = "none";
  }
  settings.config = parse_config(saved["config"], path + ": config");
  if (!saved.contains("branch")) return;
  const json branch = saved["branch"];
  const TakeSetting take{branch, path, true};
  if (!branch.is_object()) fail(Exit::bad_data, path, ": \"branch\" is not an object");
  take("run", settings.branch.run), take("step", settings.branch.step, 1);
}

void take_call_settings(const json& saved, const std::string& path, Settings& settings) {
  each_kept(settings, of_call, TakeKept{saved, path});
}

bool take_run_settings(const char* flag, const std::string& run_dir, Settings& settings) {
  const json saved = read_run_settings(run_dir);
  if (saved.is_null()) return false;
  const std::string arch = settings.config.arch;
  take_settings(saved, run_dir + "/flags.json", settings);
  if (!same_architecture(settings.config.arch, arch))
    fail(Exit::usage, flag, ": the run in ", run_dir, " is of ", trainer_of(settings.config.arch), ", not of ",
         trainer_of(arch));
  return true;
}

void refuse_other_settings(const json& saved, const Settings& now, const std::string& where,
                           const std::set<std::string>& moved) {
  if (!saved.is_object()) fail(Exit::bad_data, where, ": the flags of the run are missing");
  static const json usual = trajectory(Settings());  // for what older runs had no choice of
  const json current = trajectory(now);
  Settings settings = now;
  each_kept(settings, of_trajectory, [&](const FlagRow& row, const auto&) {
    const std::string key = row.key();
    const bool old = key == "documents" && mark_shuffle_alone(saved);
    const json &value = current[key], found = old ? usual[key] : saved.value(key, usual.value(key, json()));
    const json was = found.is_string() ? json(name_as_utf8(renewed(row, name_from_utf8(found)))) : found;
    if (was == value || moved.contains(key) || (key == "init" && now.init_moved)) return;
    if (row.resume == Resume::may_grow && was.is_number_unsigned() && was < value) return;
    const bool teacher = key == "teacher" && was != "" && value != "";
    fail(Exit::usage, now.resume ? "--resume" : "--branch", ": the run in ", where, " has ", row.flag, " ", shown(was),
         ", the flags say ", shown(value),
         row.resume == Resume::may_grow ? "; it can only grow"
         : data_settings.contains(key)  ? "; only other files with the same contents can take its place"
         : teacher                      ? "; only a directory with the same weights can take its place"
         : !now.resume                  ? "; a branch has other --steps, --schedule, --cooldown and --lr-floor only"
                                        : "; resume with the flags it was started with");
  });
}

void refuse_other_config(const Config& saved, const Config& now, const std::string& where, const char* flag) {
  const json was = to_json(saved).flatten(), is = to_json(now).flatten();
  if (was == is) return;
  std::string differences;
  json keys = was;
  keys.update(is);
  constexpr int64_t shown = 8;  // an engram_map may differ in every token
  int64_t count = 0;
  for (const auto& [key, either] : keys.items()) {
    const json old = was.value(key, json()), now_is = is.value(key, json());
    if (old != now_is && ++count <= shown)
      differences += str(" ", key.substr(1), " is ", json_text(old), ", not ", json_text(now_is), ";");
  }
  if (count > shown) differences += str(" and ", count - shown, " more;");
  fail(Exit::usage, flag, ": ", where, " is of another model than the flags describe:", differences,
       " give the flags it was started with");
}

}  // namespace crossply
