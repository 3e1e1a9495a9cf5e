#include "train/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <utility>

#include "engine/file.h"
#include "engine/json.h"

namespace crossply {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string format_seconds(double seconds) {
  const long s = static_cast<long>(seconds + 0.5);
  char text[32];
  if (s >= 3600) std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
  else std::snprintf(text, sizeof text, "%ld:%02ld", s / 60, s % 60);
  return text;
}

std::string format_count(int64_t count) {
  std::string digits = std::to_string(count), out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string format_number(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string format_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string room(widths[i] - row[i].size(), ' ');
      out += i == 0 ? row[i] + (row.size() > 1 ? room : "") : "  " + room + row[i];
    }
    out += "\n";
  }
  return out;
}

Progress::Progress(std::string label, int64_t total)
    : label_(std::move(label)), total_(total), terminal_(isatty(STDOUT_FILENO) == 1), start_(now()), last_(0) {}

void Progress::step(int64_t step, double loss, double lr, double norm, double tokens_per_second) {
  if (first_ < 0) first_ = step - 1;
  const int64_t every = std::max<int64_t>(1, total_ / 20);
  const bool keep = step % every == 0 || step == total_;
  const double time = now();
  if (!keep && (!terminal_ || time - last_ < 0.1)) return;
  last_ = time;
  const double left = (time - start_) / static_cast<double>(step - first_) * static_cast<double>(total_ - step);
  std::printf("%s%s step %lld/%lld  loss %.4f  lr %.2e  norm %.3f  %.0f tok/s  %s left%s", terminal_ ? "\r\033[K" : "",
              label_.c_str(), static_cast<long long>(step), static_cast<long long>(total_), loss, lr, norm,
              tokens_per_second, format_seconds(left).c_str(), keep ? "\n" : "");
  std::fflush(stdout);
}

void Progress::say(const std::string& line) {
  std::printf("%s%s %s\n", terminal_ ? "\r\033[K" : "", label_.c_str(), line.c_str());
  std::fflush(stdout);
}

Metrics::Metrics(const std::string& path, int64_t step) : path_(path) {
  std::ifstream old(path);
  std::string contents;
  for (std::string line; std::getline(old, line);) {
    const auto parsed = try_parse_json(line);
    if (!parsed.is_object()) break;  // a line that a kill cut short
    for (const char* key : {"step", "loss"})
      if (!parsed.contains(key) || !parsed[key].is_number())
        fail(Exit::bad_data, path, ": line ", lines_.size() + 1, " has no \"", key,
             "\"; it was not written by this program");
    if (parsed["step"] > step) break;
    contents += line + "\n";
    lines_.push_back(parsed);
  }
  write_file_atomically(path, contents);
  file_.open(path, std::ios::app);
  if (!file_) fail_io("write", path, errno);
}

void Metrics::write(const nlohmann::json& line) {
  lines_.push_back(line);
  file_ << line.dump() << std::endl;
  if (!file_) fail_io("write", path_, errno != 0 ? errno : EIO);
}

}  // namespace crossply
