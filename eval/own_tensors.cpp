#include "eval/own_tensors.h"

#include <filesystem>

#include "engine/io/file.h"
#include "engine/io/safetensors.h"

namespace crossply {

bool holds_tensors_of(const std::string& path, const std::string& kind) {
  const SafetensorsFile file(path);
  const auto found = file.metadata().find("crossply");
  return found != file.metadata().end() && found->second == kind;
}

void check_replaceable_tensors(const std::string& what, const std::string& path, const std::string& kind) {
  if (!path_exists(path)) return;
  std::error_code failed;  // what cannot be looked at is not replaced
  const bool replaceable = !std::filesystem::is_regular_file(path, failed) || std::filesystem::is_empty(path, failed);
  if (failed) fail_io("inspect", path, failed.value());
  if (replaceable) return;
  bool ours = false;
  try {
    ours = holds_tensors_of(path, kind);
  } catch (const Error& error) {
    if (error.code != Exit::bad_data) throw;
  }
  if (!ours)
    fail(Exit::usage, what, " ", path,
         " exists and was not written by this program; move it away or choose another name");
}

}  // namespace crossply
