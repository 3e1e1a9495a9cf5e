// Event files byte by byte, and what a run and its resumed parts write beside metrics.jsonl.
#include "engine/io/json.h"
#include "train/run/event_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "tests/support/check.h"
#include "tests/support/program.h"
#include "tests/support/temp_dir.h"
#include "train/run/environment.h"
#include "train/run/metrics.h"

using namespace crossply;
using namespace crossply::test;
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

// Reads messages of protobuf: each field's number, and its value as an integer or as bytes.
struct Field {
  int number;
  uint64_t integer;
  std::string bytes;
};

uint64_t take_varint(const std::string& data, size_t& at) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    REQUIRE(at < data.size());
    const auto byte = static_cast<uint8_t>(data[at++]);
    value |= uint64_t{byte & 0x7Fu} << shift;
    if (byte < 0x80) return value;
  }
}

std::vector<Field> fields_of(const std::string& data) {
  std::vector<Field> fields;
  for (size_t at = 0; at < data.size();) {
    const uint64_t key = take_varint(data, at);
    Field field{static_cast<int>(key >> 3), 0, ""};
    if ((key & 7) == 0) field.integer = take_varint(data, at);
    else {
      const size_t size = (key & 7) == 1 ? 8 : (key & 7) == 5 ? 4 : take_varint(data, at);
      REQUIRE(at + size <= data.size());
      field.bytes = data.substr(at, size);
      at += size;
    }
    fields.push_back(field);
  }
  return fields;
}

template <class T>
T number_in(const std::string& bytes) {
  T value;
  REQUIRE(bytes.size() == sizeof value);
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

// The data of the records of a file, all of which must be whole.
std::vector<std::string> records_of(const std::string& file) {
  std::vector<std::string> records;
  for (size_t at = 0; at < file.size();) {
    const auto size = number_in<uint64_t>(file.substr(at, 8));
    const std::string data = file.substr(at + 12, size);
    REQUIRE(file.substr(at, size + 16) == event_record(data));
    records.push_back(data);
    at += size + 16;
  }
  return records;
}

std::vector<std::string> files_in(const std::string& dir) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(dir)) paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  return paths;
}

// What TensorBoard shows of a directory: by tag, the values by step. A restart forgets what lies after it; a step that
// comes twice without one is an error.
std::map<std::string, std::map<int64_t, float>> scalars_in(const std::string& dir) {
  std::map<std::string, std::map<int64_t, float>> scalars;
  for (const std::string& path : files_in(dir)) {
    const auto records = records_of(read_text(path));
    REQUIRE(records.size() >= 2);
    CHECK(fields_of(records[0]).back().bytes == "brain.Event:2");
    for (const std::string& record : records) {
      int64_t step = 0;
      for (const Field& field : fields_of(record)) {
        if (field.number == 2) step = static_cast<int64_t>(field.integer);
        if (field.number == 7)
          for (auto& [tag, values] : scalars) values.erase(values.lower_bound(step), values.end());
        if (field.number != 5) continue;
        for (const Field& value : fields_of(field.bytes)) {
          const auto parts = fields_of(value.bytes);
          REQUIRE(parts.size() == 2);
          CHECK(scalars[parts[0].bytes].emplace(step, number_in<float>(parts[1].bytes)).second);
        }
      }
    }
  }
  return scalars;
}

std::vector<json> metrics_in(const std::string& run) {
  std::istringstream in(read_text(run + "/metrics.jsonl"));
  std::vector<json> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(known_json(line));
  return lines;
}

// Every number of every line, and no other.
void check_same(const std::map<std::string, std::map<int64_t, float>>& scalars, const std::vector<json>& lines) {
  size_t expected = 0, got = 0;
  for (const json& line : lines)
    for (const auto& [key, value] : line.items()) {
      if (key == "step") continue;
      ++expected;
      const auto found = scalars.find(tag_of(key));
      REQUIRE(found != scalars.end());
      REQUIRE(found->second.contains(line["step"]));
      CHECK(found->second.at(line["step"]) == value.get<float>());
    }
  for (const auto& [tag, values] : scalars) got += values.size();
  CHECK(got == expected);
}

std::vector<std::string> tiny(const std::string& out, const std::vector<std::string>& more) {
  return joined(
      split_words("--data arith:3 --train-samples 100 --test-samples 20 --width 16 --ffn 24 --layers 1 --heads 2 "
                  "--batch 4 --eval-samples 8 --answer-samples 4 --out"),
      std::vector{out}, more);
}

// metrics.jsonl with these lines.
void write_lines(const std::string& path, const std::vector<json>& lines) {
  std::string text;
  for (const json& line : lines) text += json_text(line) + "\n";
  write_text(path, text);
}

}  // namespace

TEST_CASE("event file: checksums and records as others have them") {
  CHECK(crc32c("") == 0);
  CHECK(crc32c("123456789") == 0xE3069283u);            // the check value of CRC-32C
  CHECK(crc32c(std::string(32, '\0')) == 0x8A9136AAu);  // RFC 3720, B.4
  CHECK(crc32c(std::string(32, '\xFF')) == 0x62A8AB43u);
  const std::string record = event_record("abc");
  CHECK(record.size() == 8 + 4 + 3 + 4);
  CHECK(record.substr(0, 8) == std::string("\3\0\0\0\0\0\0\0", 8));
  const uint32_t crc = crc32c("abc");
  CHECK(number_in<uint32_t>(record.substr(15)) == ((crc >> 15) | (crc << 17)) + 0xA282EAD8u);
}

TEST_CASE("event file: names are in the order of their writing, and a restart forgets what is written again") {
  const TempDir dir;
  const std::string path = dir.file("tensorboard");
  const auto line = [](int step, double loss) { return json{{"step", step}, {"loss", loss}}; };
  std::vector<json> lines;
  {
    EventFile first(path, 0, {});
    for (int step = 1; step <= 5; ++step) first.write(line(step, step));
  }
  for (int step = 1; step <= 3; ++step) lines.push_back(line(step, step));
  {
    write_lines(dir.file("metrics.jsonl"), lines);
    EventFile second(path, 3, dir.file("metrics.jsonl"));  // in the same second; the lines are there already
    for (int step = 4; step <= 6; ++step) second.write(line(step, 10 * step));
  }
  for (int step = 4; step <= 6; ++step) lines.push_back(line(step, 10 * step));
  CHECK(files_in(path).size() == 2);
  check_same(scalars_in(path), lines);
  write_lines(dir.file("metrics.jsonl"), lines);
  EventFile(dir.file("late"), 6, dir.file("metrics.jsonl"));  // asked for when the run is resumed
  check_same(scalars_in(dir.file("late")), lines);
  write_text(dir.file("file"), "x");
  CHECK(error_of([&] { EventFile(dir.file("file"), 0, {}); }).code == Exit::io);
}

TEST_CASE("event file: a full disk and a removed file are exit code 74, as with metrics.jsonl") {
  const TempDir dir;
  EventFile events(dir.path.string(), 0, {});
  fs::remove(files_in(dir.path.string()).front());
  const Error error = error_of([&] { events.write({{"step", 1}, {"loss", 1.0}}); });
  CHECK(error.code == Exit::io);
  CHECK(std::string(error.what()).find("was removed") != std::string::npos);
  if (!fs::exists("/dev/full")) return;
  LogFile full("/dev/full");
  CHECK(error_of([&] { full.append("x"); }).code == Exit::io);
}

TEST_CASE("metrics.csv: every column has its place from the start, and what is no table of ours is kept") {
  const TempDir dir;
  const std::string path = dir.file("metrics.csv");
  const json first = {{"step", 1}, {"loss", 2.5}, {"lr", 0.1}};
  {
    write_lines(dir.file("metrics.jsonl"), {first});
    MetricsTable table(path, dir.file("metrics.jsonl"));
    table.write({{"step", 2}, {"loss", 2.25}, {"test_loss", 1e-7}});
  }
  const std::string header =
      "step,tokens,loss,ce,z_loss,test_loss,lr,grad_norm,tokens_per_s,seconds,answers_correct,steps_valid,hard_correct,"
      "waiting_s,busy_least_s,busy_median_s,busy_most_s,test_sequences\n";
  CHECK(read_text(path) == header + "1,,2.5,,,,0.1,,,,,,,,,,,\n2,,2.25,,,1e-07,,,,,,,,,,,,\n");
  MetricsTable(path, dir.file("metrics.jsonl"));
  CHECK(read_text(path) == header + "1,,2.5,,,,0.1,,,,,,,,,,,\n");
  CHECK(!fs::exists(path + ".kept-1"));
  write_text(path, "mine\n");
  write_lines(dir.file("metrics.jsonl"), {});
  MetricsTable(path, dir.file("metrics.jsonl"));
  CHECK(read_text(path) == header);
  CHECK(read_text(path + ".kept-1") == "mine\n");
}

TEST_CASE("event file: a run that is resumed has every step once, in the table too, and says where it ran") {
  const TempDir dir;
  const std::string run = dir.file("run"), events = run + "/tensorboard";
  check_outcome(train(dir, tiny(run, split_words("--steps 4 --save-every 2 --tensorboard --csv"))), Exit::done, "");
  check_same(scalars_in(events), metrics_in(run));
  fs::remove_all(run + "/step_00000004");  // as if it had been killed after step 4, before the checkpoint
  check_outcome(train(dir, split_words("--resume --steps 6 --out " + run)), Exit::done, "");
  const auto lines = metrics_in(run);
  REQUIRE(lines.size() == 6);
  CHECK(files_in(events).size() == 2);
  check_same(scalars_in(events), lines);
  CHECK(scalars_in(events).contains("answers/correct"));

  // The table has as many rows, and of every number that a run writes the column.
  std::istringstream table(read_text(run + "/metrics.csv"));
  std::string header, row;
  std::getline(table, header);
  for (const json& line : lines) {
    REQUIRE(std::getline(table, row));
    CHECK(row.starts_with(json_text(line["step"]) + ","));
    for (const auto& [key, value] : line.items()) {
      CHECK_MESSAGE(("," + header + ",").find("," + key + ",") != std::string::npos, key);
      CHECK_MESSAGE((row + ",").find(json_text(value) + ",") != std::string::npos, key);
    }
  }
  CHECK(!std::getline(table, row));

  std::istringstream starts(read_text(run + "/environment.jsonl"));
  std::vector<json> environment;
  for (std::string line; std::getline(starts, line);) environment.push_back(known_json(line));
  REQUIRE(environment.size() == 2);
  CHECK(environment[0]["steps_done"] == 0);
  CHECK(environment[1]["steps_done"] == 2);
  CHECK(environment[1]["time"].get<std::string>().size() == 20);
  CHECK(environment[1]["build"]["commit"].is_string());
  CHECK(environment[1]["ranks"] == 1);
  CHECK(environment[1]["machine"]["memory_bytes"].get<int64_t>() > 1 << 20);
  CHECK(recorded_flops_per_token(run + "/environment.jsonl") > 1000);
  CHECK(std::isnan(recorded_flops_per_token(run + "/metrics.jsonl")));
}
