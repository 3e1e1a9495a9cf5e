#include "train/run/event_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/numbers.h"
#include "train/run/metrics.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;

const std::string name_start = "events.out.tfevents.";  // by which TensorBoard knows them; it reads them by name

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? 0x82F63B78u : 0u);
    table[i] = value;
  }
  return table;
}

// Little-endian.
template <class T>
std::string bytes_of(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof value; ++i) bytes += static_cast<char>(value >> 8 * i & 0xFF);
  return bytes;
}

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>((value & 0x7F) | 0x80);
  return bytes + static_cast<char>(value);
}

// Fields of a message by their numbers. The low bits say how the value is coded.
std::string integer_field(int number, int64_t value) {
  return varint(static_cast<uint64_t>(number) << 3) + varint(static_cast<uint64_t>(value));
}
std::string text_field(int number, const std::string& bytes) {
  return varint(static_cast<uint64_t>(number) << 3 | 2) + varint(bytes.size()) + bytes;
}
std::string double_field(int number, double value) {
  return varint(static_cast<uint64_t>(number) << 3 | 1) + bytes_of(std::bit_cast<uint64_t>(value));
}
std::string float_field(int number, float value) {
  return varint(static_cast<uint64_t>(number) << 3 | 5) + bytes_of(std::bit_cast<uint32_t>(value));
}

// Now, at a step.
std::string event(int64_t step, const std::string& what) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return event_record(double_field(1, std::chrono::duration<double>(now).count()) + integer_field(2, step) + what);
}

// The largest number in the names of event files; -1 where there are none.
int64_t newest_in(const std::string& dir) {
  int64_t newest = -1;
  std::error_code error;
  for (fs::directory_iterator at(dir, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (!name.starts_with(name_start)) continue;
    const std::string rest = name.substr(name_start.size());
    newest = std::max(newest, parse_integer(rest.substr(0, rest.find('.'))).value_or(0));
  }
  if (error) fail_io("list", dir, error.value());
  return newest;
}

// Seconds since 1970, as is usual in these names, but later than all files there: they are read in this order, whatever
// the clock says.
std::string new_name(const std::string& dir, int64_t newest) {
  using std::chrono::system_clock;
  const int64_t now = system_clock::to_time_t(system_clock::now());
  char number[32];
  std::snprintf(number, sizeof number, "%010lld", static_cast<long long>(std::max(now, newest + 1)));
  return dir + "/" + name_start + number + ".crossply";
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr auto table = crc_table();
  uint32_t value = ~0u;
  for (const char c : bytes) value = table[(value ^ static_cast<uint8_t>(c)) & 0xFF] ^ value >> 8;
  return ~value;
}

std::string event_record(const std::string& data) {
  const auto checksum = [](const std::string& bytes) {
    return bytes_of(std::rotr(crc32c(bytes), 15) + 0xA282EAD8u);  // masked, as the format wants it
  };
  const std::string length = bytes_of(uint64_t{data.size()});
  return length + checksum(length) + data + checksum(data);
}

std::string tag_of(const std::string& key) {
  static const std::map<std::string, std::string> tags = {{"loss", "loss/train"},
                                                          {"ce", "loss/train_ce"},
                                                          {"z_loss", "loss/train_z"},
                                                          {"test_loss", "loss/test"},
                                                          {"answers_correct", "answers/correct"},
                                                          {"steps_valid", "answers/steps_valid"},
                                                          {"hard_correct", "answers/hard"},
                                                          {"waiting_s", "ranks/waiting_s"},
                                                          {"busy_least_s", "ranks/busy_least_s"},
                                                          {"busy_median_s", "ranks/busy_median_s"},
                                                          {"busy_most_s", "ranks/busy_most_s"}};
  const auto found = tags.find(key);
  return found == tags.end() ? key : found->second;
}

std::string EventFile::summary_record(const nlohmann::json& line) {
  std::string values;
  for (const auto& [key, number] : line.items())
    if (key != "step" && number.is_number())  // routing is an object
      values += text_field(1, text_field(1, tag_of(key)) + float_field(2, static_cast<float>(number.get<double>())));
  return event(line["step"].get<int64_t>(), text_field(5, values));
}

EventFile::EventFile(const std::string& dir, int64_t step, const std::string& metrics) {
  make_directories(dir);
  const int64_t newest = newest_in(dir);
  file_ = LogFile(new_name(dir, newest), true);
  sync_directory(dir);
  constexpr int64_t start = 1;  // of a session
  file_.append(event(0, text_field(3, "brain.Event:2")) + event(step + 1, text_field(7, integer_field(1, start))));
  if (newest >= 0 || metrics.empty()) return;
  each_line(metrics, [&](const std::string& text, bool) { file_.append(summary_record(parse_line(text))); });
}

}  // namespace crossply
