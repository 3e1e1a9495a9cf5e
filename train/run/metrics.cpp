#include "train/run/metrics.h"

#include <cerrno>
#include <cstdio>

#include "engine/io/json.h"
#include "models/disk/checkpoint.h"

namespace crossply {
namespace {

using nlohmann::json;

constexpr size_t longest_line = 1 << 20;  // ours have a few hundred bytes, with routing up to some hundred thousand

// Whether it is a line of ours, for a step after `last`.
bool is_metrics_line(const json& line, int64_t last) {
  if (!line.is_object() || !line.contains("step") || !line["step"].is_number_unsigned() || !line.contains("loss"))
    return false;
  for (const auto& [key, value] : line.items())
    if (!value.is_number() && !(key == "routing" && value.is_object())) return false;
  return line["step"].get<int64_t>() > last;
}

// Calls visit(bytes, count) for a file, piece by piece.
template <class F>
void each_piece(const std::string& path, F&& visit) {
  const InputFile file(path);
  std::vector<char> piece(std::min<uint64_t>(file.size(), 1 << 20));
  for (uint64_t at = 0; at < file.size(); at += piece.size()) {
    const uint64_t n = std::min<uint64_t>(piece.size(), file.size() - at);
    file.read(at, piece.data(), n);
    visit(piece.data(), n);
  }
}

void copy_file(const std::string& from, const std::string& to) {
  OutputFile copy(to, InputFile(from).size());
  each_piece(from, [&](const char* bytes, uint64_t count) { copy.write(bytes, count); });
  copy.commit();
}

// Of metrics.csv: every number that Run::write_metrics can write.
constexpr const char* csv_columns[] = {"step",
                                       "tokens",
                                       "loss",
                                       "ce",
                                       "z_loss",
                                       "test_loss",
                                       "lr",
                                       "grad_norm",
                                       "tokens_per_s",
                                       "seconds",
                                       "answers_correct",
                                       "steps_valid",
                                       "hard_correct",
                                       "waiting_s",
                                       "busy_least_s",
                                       "busy_median_s",
                                       "busy_most_s",
                                       "test_sequences"};

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
    if (number != line.end()) row += json_text(*number);
  }
  return row + "\n";
}

}  // namespace

void each_line(const std::string& path, const std::function<void(const std::string&, bool)>& visit) {
  std::string line;
  bool begun = false;  // also one without a byte in front of its newline
  each_piece(path, [&](const char* bytes, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      begun = true;
      if (bytes[i] == '\n') {
        visit(line, true);
        line.clear(), begun = false;
      } else if (line.size() <= longest_line) {
        line += bytes[i];
      }
    }
  });
  if (begun) visit(line, false);
}

json parse_line(const std::string& text) {
  return text.size() > longest_line ? json(json::value_t::discarded) : try_parse_json(text);
}

Metrics::Metrics(const std::string& path, int64_t step) {
  size_t number = 0, first_bad = 0, good = 0;
  int64_t last = 0, kept_lines = 0;
  const bool exists = path_exists(path);
  OutputFile next(path, exists ? InputFile(path).size() : 0);
  const auto take = [&](const std::string& text, bool ended) {
    ++number;
    const json line = parse_line(text);
    if (line.is_discarded() && !ended) return;  // cut by a kill
    if (!is_metrics_line(line, last)) {
      if (first_bad == 0) first_bad = number;
      return;
    }
    last = line["step"].get<int64_t>(), ++good;
    if (last > step) return;
    next.write((text + "\n").data(), text.size() + 1);
    curves_.add(line), ++kept_lines;
  };
  if (exists) each_line(path, take);
  if (first_bad > 0 || (step == 0 && good > 0)) {
    const std::string kept = free_kept_name(path);
    copy_file(path, kept);
    notes_.push_back(step == 0 ? str("the metrics of ", good, " earlier steps are kept as ", kept)
                               : str(path, ": line ", first_bad, " is not a line of this program; the file as it was ",
                                     "is kept as ", kept, ", and its good lines go on"));
  } else if (kept_lines < step) {
    notes_.push_back(
        str(path, ": lacks ", step - kept_lines, " of the ", step, " steps so far, and so will the curves"));
  }
  next.commit();
  file_ = LogFile(path);
}

Metrics::~Metrics() = default;

void Metrics::write(const json& line) {
  curves_.add(line);
  file_.append(json_text(line) + "\n");
}

MetricsTable::MetricsTable(const std::string& path, const std::string& metrics) {
  const std::string header = header_row();
  if (path_exists(path)) {
    const InputFile old(path);
    std::string start(std::min<uint64_t>(old.size(), header.size()), ' ');
    old.read(0, start.data(), start.size());
    const std::string kept = start == header ? "" : free_kept_name(path);
    if (!kept.empty() && ::rename(path.c_str(), kept.c_str()) != 0) fail_io("rename", path, errno);
  }
  OutputFile table(path, header.size());
  table.write(header.data(), header.size());
  each_line(metrics, [&](const std::string& text, bool) {
    const std::string row = csv_row(parse_line(text));
    table.write(row.data(), row.size());
  });
  table.commit();
  file_ = LogFile(path);
}

void MetricsTable::write(const json& line) { file_.append(csv_row(line)); }

}  // namespace crossply
