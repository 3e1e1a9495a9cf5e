#include "data/encoding_progress.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "cli/format.h"
#include "cli/standard_streams.h"
#include "engine/check.h"

namespace crossply {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

EncodingProgress::EncodingProgress(std::string label, uint64_t all, uint64_t before)
    : label_(std::move(label)),
      all_(all),
      before_(before),
      terminal_(takes_escape_codes(STDERR_FILENO)),
      start_(now()),
      last_(start_) {}

EncodingProgress::~EncodingProgress() {
  if (terminal_ && shown_) std::fprintf(stderr, "\r\033[K");
}

double EncodingProgress::seconds() const { return std::max(1e-9, now() - start_); }

void EncodingProgress::tell(uint64_t taken, int64_t text, int64_t tokens) {
  const double time = now();
  if (time - last_ < (terminal_ ? 0.2 : 30)) return;
  last_ = time;
  shown_ = true;
  std::string line = str(label_, ": ", format_count(static_cast<int64_t>(taken) / 1'000'000));
  if (all_ > 0) line += " of " + format_count(static_cast<int64_t>(all_) / 1'000'000);
  line += str(" MB, ", format_number("%.1f", static_cast<double>(text) / 1e6 / seconds()), " MB/s of text");
  if (tokens > 0)
    line += ", " + format_count(static_cast<int64_t>(static_cast<double>(tokens) / seconds())) + " tokens/s";
  if (all_ > 0 && taken > before_ && taken <= all_)
    line += ", " +
            format_seconds(seconds() * static_cast<double>(all_ - taken) / static_cast<double>(taken - before_)) +
            " left";
  std::fprintf(stderr, "%s%s%s", terminal_ ? "\r\033[K" : "", line.c_str(), terminal_ ? "" : "\n");
}

}  // namespace crossply
