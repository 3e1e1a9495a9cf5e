// Event files, which TensorBoard draws: the numbers of metrics.jsonl under its kind of names.
//
// A file is a sequence of records: length (u64), its checksum (u32), the data, its checksum; the data is a message of
// protobuf. Written by hand, because a library of protobuf is many times as large as these four messages:
//   Event {1: wall_time (double), 2: step (int64), 3: file_version (string), 5: Summary, 7: SessionLog {1: status}}
//   Summary {1: repeated Value {1: tag (string), 2: simple_value (float)}}
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "train/run/log_file.h"

namespace crossply {

// The checksum of Castagnoli's polynomial, as iSCSI has it.
uint32_t crc32c(std::string_view bytes);
// A record of an event file.
std::string event_record(const std::string& event);
// The name of a number of metrics.jsonl in TensorBoard, where a part before "/" is a group: "loss/test" for test_loss.
std::string tag_of(const std::string& key);

class EventFile {
 public:
  // A new file in `dir`, which is made where it is not there. It begins with the restart of a session after `step`: of
  // older files there TensorBoard forgets what lies after that, because the run writes it again. Where there are none,
  // it has the lines so far, from metrics.jsonl ("": none). Throws Exit::io.
  EventFile(const std::string& dir, int64_t step, const std::string& metrics);
  // The numbers of a line of metrics.jsonl, at its step. Reaches the system before it returns; Exit::io.
  void write(const nlohmann::json& line) { file_.append(summary_record(line)); }
  void sync() const { file_.sync(); }

 private:
  static std::string summary_record(const nlohmann::json& line);
  LogFile file_;
};

}  // namespace crossply
