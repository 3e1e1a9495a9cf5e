// Where long work stands: over itself on a terminal, every half a minute as a line of a log.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

#include "cli/format.h"

namespace crossply {

class Ticker {
 public:
  // "LABEL: UNIT 3 of 7, 0:12 left"
  Ticker(std::string label, std::string unit)
      : label_(std::move(label)), unit_(std::move(unit)), start_(now()), last_(start_) {}
  ~Ticker() {
    if (terminal_) std::fprintf(stderr, "\r\033[K");
  }
  // done: more than 0.
  void tell(int64_t done, int64_t all) {
    const double time = now();
    if (time - last_ < (terminal_ ? 0.2 : 30)) return;
    last_ = time;
    const double left = (time - start_) / static_cast<double>(done) * static_cast<double>(all - done);
    std::fprintf(stderr, "%s%s: %s %s of %s, %s left%s", terminal_ ? "\r\033[K" : "", label_.c_str(), unit_.c_str(),
                 format_count(done).c_str(), format_count(all).c_str(), format_seconds(left).c_str(),
                 terminal_ ? "" : "\n");
  }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  std::string label_, unit_;
  bool terminal_ = isatty(STDERR_FILENO) == 1;
  double start_, last_;
};

}  // namespace crossply
