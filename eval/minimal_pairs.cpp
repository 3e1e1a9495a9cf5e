#include "eval/minimal_pairs.h"

#include <algorithm>
#include <filesystem>

#include "cli/format.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr uint64_t max_file_bytes = uint64_t{1} << 30;
constexpr size_t max_name = 52;  // columns: the longest of BLiMP has 51, and the table 80

std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end())
    fail(Exit::bad_data, "\"", key, "\" is missing; a pair has \"sentence_good\", \"sentence_bad\", ",
         "\"linguistics_term\" and \"field\"");
  if (!found->is_string() || found->get_ref<const std::string&>().empty())
    fail(Exit::bad_data, "\"", key, "\" is ", excerpt(json_text(*found)), ", expected a text that is not empty");
  return *found;
}

std::vector<std::string> pair_paths(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {path};  // a missing file says so when it is opened
  std::vector<std::string> paths;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error))
    if (it->path().extension() == ".jsonl") paths.push_back(it->path().string());
  if (error) fail_io("list", path, error.value());
  if (paths.empty())
    fail(Exit::no_input, path, ": no file in it ends with .jsonl; --pairs takes a directory of such files, or one");
  std::sort(paths.begin(), paths.end());
  return paths;
}

PairFile read_file_of_pairs(const std::string& path, const ScoreRequests& requests) {
  PairFile file{fs::path(path).stem().string(), {}};
  const std::string text = read_file(path, max_file_bytes);
  int64_t number = 1;
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1, ++number) {
    end = std::min(text.find('\n', begin), text.size());
    std::string_view line(text.data() + begin, end - begin);
    if (line.ends_with('\r')) line.remove_suffix(1);
    const std::string where = str(path, ": line ", number);
    if (line.empty()) fail(Exit::bad_data, where, " is empty; take it out");
    file.pairs.push_back(parse_minimal_pair(line, where, requests));
  }
  if (file.pairs.empty()) fail(Exit::bad_data, path, ": there is no pair in it");
  return file;
}

std::vector<std::string> row_of(const std::string& name, const PairAccuracy& of) {
  std::string shown = printable(name);
  if (shown.size() > max_name) shown = shown.substr(0, valid_utf8(shown.substr(0, max_name - 3))) + "...";
  std::replace(shown.begin(), shown.end(), '\n', ' ');
  return {shown, format_count(of.pairs), format_number("%.2f%%", 100 * of.share()), format_count(of.ties)};
}

Json json_of(const PairAccuracy& of) {
  return {{"pairs", of.pairs}, {"right", of.right}, {"accuracy", of.share()}, {"ties", of.ties}};
}

}  // namespace

MinimalPair parse_minimal_pair(std::string_view line, const std::string& where, const ScoreRequests& requests) {
  const Json object = parse_json<Json>(line, where);
  try {
    if (!object.is_object()) fail(Exit::bad_data, "a pair is a JSON object, not ", excerpt(line));
    const std::string good = text_at(object, "sentence_good"), bad = text_at(object, "sentence_bad");
    return {{requests.sentence(good, "sentence_good"), requests.sentence(bad, "sentence_bad")},
            text_at(object, "linguistics_term"),
            text_at(object, "field")};
  } catch (const Error& error) {  // also of a tokenizer, for which a word it does not know is wrong usage
    fail(Exit::bad_data, where, ": ", error.what());
  }
}

std::vector<PairFile> read_minimal_pairs(const std::string& path, const ScoreRequests& requests) {
  std::vector<PairFile> files;
  for (const std::string& one : pair_paths(path)) files.push_back(read_file_of_pairs(one, requests));
  return files;
}

void PairAccuracy::add(const PairScore& score) {
  ++pairs;
  right += score.good >= score.bad;
  ties += score.good == score.bad;
}

PairResults count_pairs(const std::vector<PairFile>& files, const std::vector<PairScore>& scores) {
  PairResults results;
  auto score = scores.begin();
  for (const PairFile& file : files) {
    PairAccuracy& of_file = results.files.emplace_back();
    for (const MinimalPair& pair : file.pairs) {
      for (PairAccuracy* sum :
           {&of_file, &results.phenomena[pair.phenomenon], &results.fields[pair.field], &results.all})
        sum->add(*score);
      ++score;
    }
  }
  CHECK_THAT(score == scores.end(), scores.size(), " scores of ", results.all.pairs, " pairs");
  return results;
}

std::string describe(const std::vector<PairFile>& files, const PairResults& results) {
  const auto head = [](const char* name) { return std::vector<std::string>{name, "pairs", "accuracy", "ties"}; };
  std::vector<std::vector<std::string>> rows = {head("file")};
  for (size_t i = 0; i < files.size(); ++i) rows.push_back(row_of(files[i].name, results.files[i]));
  rows.push_back({""});
  rows.push_back(head("phenomenon"));
  for (const auto& [name, accuracy] : results.phenomena) rows.push_back(row_of(name, accuracy));
  rows.push_back({""});
  rows.push_back(head("field"));
  for (const auto& [name, accuracy] : results.fields) rows.push_back(row_of(name, accuracy));
  rows.push_back({""});
  rows.push_back(row_of("all", results.all));
  return format_table(rows);
}

Json to_json(const PairResults& results) {
  Json all = json_of(results.all);
  for (const char* key : {"fields", "phenomena"}) all[key] = Json::object();
  for (const auto& [name, accuracy] : results.fields) all["fields"][utf8_or_escaped(name)] = json_of(accuracy);
  for (const auto& [name, accuracy] : results.phenomena) all["phenomena"][utf8_or_escaped(name)] = json_of(accuracy);
  return all;
}

Json to_json(const std::vector<PairFile>& files, const std::vector<PairScore>& scores, const PairResults& results) {
  Json all = to_json(results);
  all["files"] = Json::object();
  auto score = scores.begin();
  for (size_t i = 0; i < files.size(); ++i) {
    Json of_file = json_of(results.files[i]), good = Json::array(), bad = Json::array();
    for (size_t n = 0; n < files[i].pairs.size(); ++n, ++score) good.push_back(score->good), bad.push_back(score->bad);
    of_file["good"] = good, of_file["bad"] = bad;
    all["files"][utf8_or_escaped(files[i].name)] = of_file;
  }
  return all;
}

}  // namespace crossply
