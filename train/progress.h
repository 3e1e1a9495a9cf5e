// What a run tells: a status line on a terminal, plain lines in a log.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossply {

class Progress {
 public:
  // label: printed before every line. total: steps of the run.
  Progress(std::string label, int64_t total);
  // After every step: rewrites the status line if standard output is a terminal, at most ten times a second; prints a
  // line of its own every twentieth of the run, otherwise.
  void step(int64_t step, double loss, double lr, double norm, double tokens_per_second);
  // A line that stays.
  void say(const std::string& line);

 private:
  std::string label_;
  int64_t total_, first_ = -1;
  bool terminal_;
  double start_ = 0, last_ = 0;
};

// "2:05" or "1:02:05".
std::string format_seconds(double seconds);
// "8,640".
std::string format_count(int64_t count);
// By a format of printf's for one double.
std::string format_number(const char* format, double value);
// Rows of cells as lines, in columns: the first one begins at the left, the others end at the right.
std::string format_table(const std::vector<std::vector<std::string>>& rows);

}  // namespace crossply
