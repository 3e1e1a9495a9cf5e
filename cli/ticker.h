// Where long work stands that prints nothing else meanwhile: over itself on a terminal, every half a minute in a log.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

#include "cli/format.h"
#include "cli/standard_streams.h"

namespace crossply {

// Of standard error.
class Ticker {
 public:
  // label: what works, "" for no name; noun: of what is counted.
  Ticker(std::string label, std::string noun)
      : label_(label.empty() ? "" : label + ": "), noun_(std::move(noun)), start_(now()), last_(start_) {}
  ~Ticker() {
    if (terminal_) std::fprintf(stderr, "\r\033[K");
  }
  // done: at least 1. rate: said before the time left.
  void tell(int64_t done, int64_t all, const std::string& rate = "") {
    const double time = now();
    if (time - last_ < (terminal_ ? 0.2 : 30)) return;
    last_ = time;
    const double left = (time - start_) / static_cast<double>(done) * static_cast<double>(all - done);
    std::fprintf(stderr, "%s%s%s %s of %s, %s%s left%s", terminal_ ? "\r\033[K" : "", label_.c_str(), noun_.c_str(),
                 format_count(done).c_str(), format_count(all).c_str(), rate.empty() ? "" : (rate + ", ").c_str(),
                 format_seconds(left).c_str(), terminal_ ? "" : "\n");
  }
  double seconds() const { return now() - start_; }

 private:
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  std::string label_, noun_;
  bool terminal_ = takes_escape_codes(STDERR_FILENO);
  double start_, last_;
};

}  // namespace crossply
