#include "train/metrics.h"

#include <cerrno>
#include <cstdio>
#include <limits>

#include "engine/json.h"
#include "models/checkpoint.h"

namespace crossply {
namespace {

using nlohmann::json;

constexpr size_t longest_line = 4096;  // ours have a few hundred bytes

json parse_line(const std::string& text) {
  return text.size() > longest_line ? json(json::value_t::discarded) : try_parse_json(text);
}

// Whether it is a line of ours, for a step after `last`.
bool is_metrics_line(const json& line, int64_t last) {
  if (!line.is_object() || !line.contains("step") || !line["step"].is_number_unsigned() || !line.contains("loss"))
    return false;
  for (const auto& [key, value] : line.items())
    if (!value.is_number()) return false;
  return line["step"].get<int64_t>() > last;
}

std::string read_text(const std::string& path) {
  return path_exists(path) ? read_file(path, std::numeric_limits<int64_t>::max()) : "";
}

// Of metrics.csv: every number that Run::write_metrics can write.
constexpr const char* csv_columns[] = {"step",        "tokens",       "loss",         "ce",           "test_loss",
                                       "lr",          "grad_norm",    "tokens_per_s", "seconds",      "answers_correct",
                                       "steps_valid", "hard_correct", "waiting_s",    "busy_least_s", "busy_median_s",
                                       "busy_most_s"};

std::string header_row() {
  std::string row;
  for (const char* column : csv_columns) row += (row.empty() ? "" : ",") + std::string(column);
  return row + "\n";
}

std::string csv_row(const json& line) {
  std::string row;
  for (const char* column : csv_columns) {
    const auto number = line.find(column);
    row += column == csv_columns[0] ? "" : ",";
    if (number != line.end()) row += number->dump();
  }
  return row + "\n";
}

}  // namespace

Metrics::Metrics(const std::string& path, int64_t step) {
  const std::string old = read_text(path);
  std::string contents;
  size_t number = 0, first_bad = 0, good = 0;
  int64_t last = 0;
  for (size_t at = 0, end; at < old.size(); at = end + 1) {
    end = std::min(old.find('\n', at), old.size());
    ++number;
    const std::string text = old.substr(at, end - at);
    json line = parse_line(text);
    if (line.is_discarded() && end == old.size()) break;  // cut by a kill
    if (!is_metrics_line(line, last)) {
      if (first_bad == 0) first_bad = number;
      continue;
    }
    last = line["step"].get<int64_t>(), ++good;
    if (last > step) continue;
    contents += text + "\n";
    lines_.push_back(std::move(line));
  }
  if (first_bad > 0 || (step == 0 && good > 0)) {
    const std::string kept = free_kept_name(path);
    write_file_atomically(kept, old);
    notes_.push_back(step == 0 ? str("the metrics of ", good, " earlier steps are kept as ", kept)
                               : str(path, ": line ", first_bad, " is not a line of this program; the file as it was ",
                                     "is kept as ", kept, ", and its good lines go on"));
  } else if (static_cast<int64_t>(lines_.size()) < step) {
    notes_.push_back(str(path, ": lacks ", step - static_cast<int64_t>(lines_.size()), " of the ", step,
                         " steps so far, and so will the curves"));
  }
  write_file_atomically(path, contents);
  file_ = LogFile(path);
}

Metrics::~Metrics() = default;

void Metrics::write(const json& line) {
  lines_.push_back(line);
  file_.append(line.dump() + "\n");
}

MetricsTable::MetricsTable(const std::string& path, const std::vector<json>& lines) {
  if (path_exists(path) && !read_text(path).starts_with(header_row())) {
    const std::string kept = free_kept_name(path);
    if (::rename(path.c_str(), kept.c_str()) != 0) fail_io("rename", path, errno);
  }
  std::string contents = header_row();
  for (const json& line : lines) contents += csv_row(line);
  write_file_atomically(path, contents);
  file_ = LogFile(path);
}

void MetricsTable::write(const json& line) { file_.append(csv_row(line)); }

}  // namespace crossply
