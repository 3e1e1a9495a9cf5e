#include "train/run/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cli/format.h"
#include "cli/standard_streams.h"
#include "engine/check.h"
#include "engine/io/printable.h"
#include "engine/numbers.h"

namespace crossply {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

std::string format_status(const Status& s, size_t width) {
  struct Part {
    int importance;
    std::string text;
  };
  const std::string rate = s.tokens_per_second > 0 ? format_count(static_cast<int64_t>(s.tokens_per_second)) : "-";
  std::vector<Part> parts = {{5, format_number("  loss %.4f", s.loss)},
                             {0, std::isnan(s.z_loss) ? "" : format_number("  z-loss %.2e", s.z_loss)},
                             {2, format_number("  lr %.2e", s.lr)},
                             {1, format_number("  norm %.3f", s.norm)},
                             {3, "  " + rate + " tok/s"},
                             {6, "  " + format_seconds(s.seconds_left) + " left"},
                             {4, s.runs_after > 0 ? " in all" : ""}};
  const std::string step = str("step ", s.step, "/", s.total);
  std::string label = s.label + " ";
  auto line = [&] {
    std::string text = label + step;
    for (const Part& part : parts) text += part.text;
    return text;
  };
  if (line().size() > width) label.resize(label.find_last_not_of(' ') + 1), label += " ";
  while (line().size() > width && !parts.empty())
    parts.erase(std::min_element(parts.begin(), parts.end(),
                                 [](const Part& a, const Part& b) { return a.importance < b.importance; }));
  if (line().size() > width) label = width > step.size() ? label.substr(0, width - step.size() - 1) + " " : "";
  return line().substr(0, width);
}

size_t terminal_width() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const char* columns = std::getenv("COLUMNS");
  const auto number = columns == nullptr ? std::nullopt : parse_integer(columns);
  return number && *number > 0 ? static_cast<size_t>(*number) : 80;
}

std::string format_line(const std::string& line, bool terminal, const std::string& command) {
  const std::string text = printable(line);
  if (!terminal) return text + command + "\n";
  constexpr size_t indent = 2;
  const size_t width = std::max<size_t>(terminal_width(), 20) - indent - 1;
  const std::string wrapped = wrap(text, width, indent);  // without a blank at its end
  return wrapped + (command.empty() ? "" : "\n" + std::string(indent, ' ') + command) + "\n";
}

void print_line(const std::string& line, bool terminal, const std::string& command) {
  std::printf("%s", format_line(line, terminal, command).c_str());
  std::fflush(stdout);
}

Progress::Progress(const std::string& label, int64_t total, int64_t runs_after, bool plain)
    : label_(printable(label)),
      total_(total),
      runs_after_(runs_after),
      terminal_(!plain && takes_escape_codes(STDOUT_FILENO)),
      start_(now()) {}

void Progress::clear() {
  if (!terminal_) return;
  if (const size_t rows = shown_ > 0 ? (shown_ - 1) / terminal_width() : 0; rows > 0) std::printf("\033[%zuA", rows);
  std::printf("\r\033[J");
  shown_ = 0;
}

void Progress::step(int64_t step, double loss, double lr, double norm, double tokens, double seconds, double z_loss) {
  if (first_ < 0) first_ = step - 1;
  tokens_ += tokens, seconds_ += seconds;
  const int64_t every = std::max<int64_t>(1, total_ / 20);
  const bool keep = step % every == 0 || step == total_;
  const double time = now();
  if (!keep && (!terminal_ || time - last_ < 0.1)) return;
  last_ = time;
  const double each = (time - start_) / static_cast<double>(step - first_);
  const double left = each * static_cast<double>(total_ - step + runs_after_ * total_);
  // The last column stays free: some terminals begin a new line as soon as it is taken.
  const double rate = seconds_ > 0 ? tokens_ / seconds_ : 0;
  tokens_ = seconds_ = 0;
  const std::string line = format_status({label_, step, total_, loss, lr, norm, rate, left, runs_after_, z_loss},
                                         terminal_ ? terminal_width() - 1 : std::string::npos);
  clear();
  std::printf("%s%s", line.c_str(), keep ? "\n" : "");
  if (!keep) shown_ = line.size();
  std::fflush(stdout);
}

void Progress::say(const std::string& line, const std::string& command) {
  clear();
  print_line(label_ + " " + line, terminal_, command);
}

}  // namespace crossply
