// What a run tells: a status line on a terminal, plain lines in a log.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

namespace crossply {

// Where a run stands. tokens_per_second: 0 where it is not known; z_loss: NaN where there is none. seconds_left counts
// the runs that follow, too.
struct Status {
  std::string label;
  int64_t step, total;  // steps of this run
  double loss, lr, norm, tokens_per_second, seconds_left;
  int64_t runs_after = 0;
  double z_loss = NAN;
};
// The status in at most `width` columns. What matters least is left out first: z-loss, norm, rate, speed, "in all",
// loss, time left; then the label is cut.
std::string format_status(const Status& status, size_t width);

// Columns of the terminal that standard output is; else of COLUMNS, else 80.
size_t terminal_width();
// Safe for a terminal; on one broken to its columns, what follows indented by two. command: to be copied into a shell,
// never broken: at the end of the line, on a terminal on the next one.
std::string format_line(const std::string& line, bool terminal, const std::string& command);
// The same, printed at once.
void print_line(const std::string& line, bool terminal, const std::string& command = "");

class Progress {
 public:
  // label: printed before every line. total: steps of the run. runs_after: like this one, for the time left. plain: no
  // status line, even on a terminal.
  Progress(const std::string& label, int64_t total, int64_t runs_after = 0, bool plain = false);
  // After every step, with its tokens and seconds: rewrites the status line if standard output is a terminal, at most
  // ten times a second; leaves a line every twentieth of the run. The rate is that of the steps since the line before.
  void step(int64_t step, double loss, double lr, double norm, double tokens, double seconds, double z_loss = NAN);
  // A line that stays; command as for print_line.
  void say(const std::string& line, const std::string& command = "");

 private:
  // Wipes the status line, also where a terminal that became narrower has broken it.
  void clear();

  std::string label_;
  int64_t total_, runs_after_, first_ = -1;
  bool terminal_;
  size_t shown_ = 0;  // columns of the status line on the screen
  double start_ = 0, last_ = 0;
  double tokens_ = 0, seconds_ = 0;  // since the last line
};

}  // namespace crossply
