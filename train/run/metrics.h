// metrics.jsonl: one JSON object a line, one line a step.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "train/run/log_file.h"
#include "train/run/run_curves.h"

namespace crossply {

// 0 where the clock stood still: then no rate is known.
inline double tokens_per_second(int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

// Calls visit(text, ended) for each line of a file, one in memory at a time; of a line too long to be ours only its
// beginning. ended: by a newline, not by the file. Throws as InputFile.
void each_line(const std::string& path, const std::function<void(const std::string&, bool)>& visit);
// Discarded where it is no JSON, or too long to be ours.
nlohmann::json parse_line(const std::string& text);

class Metrics {
 public:
  // Continues the file after `step`: later lines are dropped, because the run writes them again, and so is a last line
  // that a kill cut short. A file with any other line that is not ours, or with lines where the run starts at step 0,
  // is kept under another name; notes() says so, and how many steps have no line. Throws Exit::bad_data for what is
  // not a regular file, Exit::io.
  Metrics(const std::string& path, int64_t step);
  ~Metrics();
  // Reaches the system before it returns. Exit::io if that fails or if the file was removed.
  void write(const nlohmann::json& line);
  // Makes the lines durable: before a checkpoint, so that none of its steps can lack its line.
  void sync() const { file_.sync(); }
  // Of the lines so far, with those of earlier parts of a resumed run; of bounded size.
  const RunCurves& curves() const { return curves_.curves(); }
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  CurveBuilder curves_;
  std::vector<std::string> notes_;
  LogFile file_;
};

// The same lines as metrics.csv, for spreadsheets: a header with every column that a run can have, in one order, and an
// empty place where a step lacks the number. Written anew from the lines of metrics.jsonl so far; a file that does not
// begin with that header is kept under another name. Throws as Metrics.
class MetricsTable {
 public:
  MetricsTable(const std::string& path, const std::string& metrics);
  void write(const nlohmann::json& line);

 private:
  LogFile file_;
};

}  // namespace crossply
