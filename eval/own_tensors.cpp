#include "eval/own_tensors.h"

#include <filesystem>

#include "engine/safetensors.h"

namespace crossply {

void check_replaceable_tensors(const std::string& what, const std::string& path, const std::string& kind) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored) || std::filesystem::is_empty(path, ignored)) return;
  bool ours = false;
  try {
    const auto metadata = SafetensorsFile(path).metadata();
    const auto found = metadata.find("crossply");
    ours = found != metadata.end() && found->second == kind;
  } catch (const Error& error) {
    if (error.code != Exit::bad_data) throw;
  }
  if (!ours)
    fail(Exit::usage, what, " ", path,
         " exists and was not written by this program; move it away or choose another name");
}

}  // namespace crossply
