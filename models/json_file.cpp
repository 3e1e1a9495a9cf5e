#include "models/json_file.h"

#include <nlohmann/json.hpp>

#include "engine/file.h"

namespace crossply {

nlohmann::json read_json(const std::string& path) {
  const InputFile file(path);
  constexpr uint64_t limit = 64 << 20;
  if (file.size() > limit) fail(Exit::bad_data, path, ": ", file.size(), " bytes is too large for such a file");
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  auto object = nlohmann::json::parse(text, nullptr, false);
  if (!object.is_object()) fail(Exit::bad_data, path, ": not a JSON object");
  return object;
}

}  // namespace crossply
