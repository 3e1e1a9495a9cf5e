#include "models/json_file.h"

#include <cmath>
#include <limits>

#include "engine/file.h"
#include "engine/json.h"
#include "engine/printable.h"

namespace crossply {

namespace {

// good: is the value of the type, and in the range, of T?
template <class T, class F>
void read_value(const nlohmann::json& object, const char* key, T& into, const std::string& where, F&& good) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return;
  if (!good(*it)) fail(Exit::bad_data, where, ": key \"", key, "\" has the wrong type: ", excerpt(it->dump()));
  into = it->template get<T>();
}

}  // namespace

nlohmann::json read_json(const std::string& path) {
  constexpr uint64_t most = 64 << 20;
  auto object = parse_json(read_file(path, most), path);
  if (!object.is_object()) fail(Exit::bad_data, path, ": not a JSON object");
  return object;
}

void read(const nlohmann::json& object, const char* key, bool& into, const std::string& where) {
  read_value(object, key, into, where, [](const auto& value) { return value.is_boolean(); });
}

void read(const nlohmann::json& object, const char* key, int64_t& into, const std::string& where) {
  read_value(object, key, into, where, [](const auto& value) {
    return value.is_number_integer() && (!value.is_number_unsigned() || value <= std::numeric_limits<int64_t>::max());
  });
}

void read(const nlohmann::json& object, const char* key, double& into, const std::string& where) {
  read_value(object, key, into, where,
             [](const auto& value) { return value.is_number() && std::isfinite(value.template get<double>()); });
}

void read(const nlohmann::json& object, const char* key, std::string& into, const std::string& where) {
  read_value(object, key, into, where, [](const auto& value) { return value.is_string(); });
}

}  // namespace crossply
