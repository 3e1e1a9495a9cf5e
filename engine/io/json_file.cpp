#include "engine/io/json_file.h"

#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/printable.h"

namespace crossply {

nlohmann::json read_json(const std::string& path) {
  constexpr uint64_t most = 64 << 20;
  auto object = parse_json(read_file(path, most), path);
  if (!object.is_object()) fail(Exit::bad_data, path, ": not a JSON object");
  return object;
}

template <class T>
void read(const nlohmann::json& object, const char* key, T& into, const std::string& where) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return;
  if (!holds<T>(*it)) fail(Exit::bad_data, where, ": key \"", key, "\" has the wrong type: ", excerpt(json_text(*it)));
  into = it->template get<T>();
}
template void read(const nlohmann::json&, const char*, bool&, const std::string&);
template void read(const nlohmann::json&, const char*, int64_t&, const std::string&);
template void read(const nlohmann::json&, const char*, double&, const std::string&);
template void read(const nlohmann::json&, const char*, std::string&, const std::string&);

}  // namespace crossply
