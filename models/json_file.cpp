#include "models/json_file.h"

#include "engine/file.h"
#include "engine/json.h"

namespace crossply {

nlohmann::json read_json(const std::string& path) {
  constexpr uint64_t most = 64 << 20;
  auto object = parse_json(read_file(path, most), path);
  if (!object.is_object()) fail(Exit::bad_data, path, ": not a JSON object");
  return object;
}

}  // namespace crossply
