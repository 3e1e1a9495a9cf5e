// The rotary keys of a LLaMA: which frequencies, and how they are stretched for longer sequences.
#include <algorithm>

#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "models/disk/config_keys.h"

namespace crossply {
namespace {

using nlohmann::json;

const std::string original_length = "original_max_position_embeddings";

struct NumberKey {
  const char* key;
  double RopeScaling::*value;
};
constexpr NumberKey llama3_keys[] = {{"low_freq_factor", &RopeScaling::low_freq_factor},
                                     {"high_freq_factor", &RopeScaling::high_freq_factor}};
constexpr NumberKey yarn_keys[] = {{"beta_fast", &RopeScaling::beta_fast}, {"beta_slow", &RopeScaling::beta_slow}};

struct OptionalKey {
  const char* key;
  std::optional<double> RopeScaling::*value;
};
constexpr OptionalKey optional_yarn_keys[] = {{"attention_factor", &RopeScaling::attention_factor},
                                              {"mscale", &RopeScaling::mscale},
                                              {"mscale_all_dim", &RopeScaling::mscale_all_dim}};

// The keys of each type, beside its name and the base. "finetuned" is a remark in older files with yarn.
std::set<std::string> keys_of(const std::string& rope_type) {
  if (rope_type == "linear") return {"factor"};
  if (rope_type == "llama3") return split_words("factor low_freq_factor high_freq_factor " + original_length);
  if (rope_type == "yarn")
    return split_words("factor beta_fast beta_slow attention_factor mscale mscale_all_dim truncate finetuned " +
                       original_length);
  return {};
}

// Both spellings of the key, the newer one first; "default" where neither is there.
std::string rope_type_of(const json& rope, const std::string& where) {
  const auto known = [](const json& type) {
    return type == "default" || type == "linear" || type == "llama3" || type == "yarn";
  };
  const json type = rope.value("rope_type", rope.value("type", json("default"))), older = rope.value("type", type);
  if (!known(type))
    fail(Exit::bad_data, where, ".rope_type\": ", shown(type),
         " is not computed here; \"default\", \"linear\", \"llama3\" and \"yarn\" are");
  if (older != type)
    fail(Exit::bad_data, where, "\" has \"rope_type\": ", shown(type), " and \"type\": ", shown(older),
         "; which one is meant? Remove the other");
  return type;
}

bool has_meaning(const RopeScaling& s) {
  const double low = s.rope_type == "yarn" ? s.beta_slow : s.low_freq_factor;
  const double high = s.rope_type == "yarn" ? s.beta_fast : s.high_freq_factor;
  const bool ordered = high > low || (s.rope_type == "yarn" && high == low);
  return s.factor >= 1 && std::isfinite(s.factor) && low > 0 && ordered && std::isfinite(high) &&
         s.original_max_position_embeddings >= 1;
}

RopeScaling read_scaling(const json& rope, const std::string& rope_type, int64_t positions, const std::string& where) {
  RopeScaling scaling;
  scaling.rope_type = rope_type;
  const auto read_needed = [&](const std::string& key, auto& into) {
    if (!rope.contains(key) || rope[key].is_null())
      fail(Exit::bad_data, where, ": rope_type ", rope_type, " needs \"", key, "\"");
    read(rope, key.c_str(), into, where);
  };
  read_needed("factor", scaling.factor);
  if (rope_type == "llama3") {
    for (const NumberKey& f : llama3_keys) read_needed(f.key, scaling.*f.value);
    read_needed(original_length, scaling.original_max_position_embeddings);
  }
  if (rope_type == "yarn") {
    scaling.original_max_position_embeddings = positions;
    read(rope, original_length.c_str(), scaling.original_max_position_embeddings, where);
    for (const NumberKey& f : yarn_keys) {
      double value = 0;  // which means the default, as null does
      read(rope, f.key, value, where);
      if (value != 0) scaling.*f.value = value;
    }
    for (const OptionalKey& f : optional_yarn_keys)
      if (rope.contains(f.key) && !rope[f.key].is_null()) read(rope, f.key, (scaling.*f.value).emplace(), where);
    read(rope, "truncate", scaling.truncate, where);
  }
  if (!has_meaning(scaling))
    fail(Exit::bad_data, where, ": rope_type ", rope_type, " with ", shown(rope), " has no meaning");
  return scaling;
}

}  // namespace

void read_rope(const json& object, Config& config, const std::string& where) {
  read(object, "rope_theta", config.rope_theta, where);
  std::string before;  // the key that was read already
  for (const std::string key : {"rope_parameters", "rope_scaling"}) {
    const auto it = object.find(key);
    if (it == object.end() || it->is_null()) continue;
    const json& rope = *it;
    if (!rope.is_object()) fail(Exit::bad_data, where, ": \"", key, "\" must be an object, is ", shown(rope));
    const std::string rope_type = rope_type_of(rope, str(where, ": \"", key));
    require(rope, "partial_rotary_factor", 1.0, str(where, ": ", key));
    const std::set<std::string> own = keys_of(rope_type);
    for (const auto& [name, value] : rope.items()) {
      static const auto always = split_words("rope_theta rope_type type partial_rotary_factor");
      if (!always.contains(name) && !own.contains(name))
        fail(Exit::bad_data, where, ": \"", key, ".", excerpt(name), "\": ", shown(value), " is not computed here");
    }
    std::optional<RopeScaling> scaling;
    if (rope_type != "default")
      scaling = read_scaling(rope, rope_type, config.max_position_embeddings, str(where, ": ", key));
    if (!before.empty() && scaling != config.rope_scaling)
      fail(Exit::bad_data, where, ": \"", before, "\" and \"", key, "\" say different things; which one is meant? ",
           "Remove the other");
    config.rope_scaling = scaling;
    if (object.contains("rope_theta") && rope.contains("rope_theta") && object["rope_theta"] != rope["rope_theta"])
      fail(Exit::bad_data, where, ": \"rope_theta\" is ", shown(object["rope_theta"]), ", \"", key, ".rope_theta\" is ",
           shown(rope["rope_theta"]), "; which one is meant? Make them equal");
    read(rope, "rope_theta", config.rope_theta, where);
    before = key;
  }
}

json rope_json(const Config& config) {
  json rope = {{"rope_type", "default"}, {"rope_theta", config.rope_theta}};
  if (!config.rope_scaling) return rope;
  const RopeScaling& scaling = *config.rope_scaling;
  rope["rope_type"] = scaling.rope_type;
  rope["factor"] = scaling.factor;
  if (scaling.rope_type == "linear") return rope;
  rope[original_length] = scaling.original_max_position_embeddings;
  if (scaling.rope_type == "llama3") {
    for (const NumberKey& f : llama3_keys) rope[f.key] = scaling.*f.value;
    return rope;
  }
  for (const NumberKey& f : yarn_keys) rope[f.key] = scaling.*f.value;
  for (const OptionalKey& f : optional_yarn_keys)
    if (scaling.*f.value) rope[f.key] = *(scaling.*f.value);
  if (!scaling.truncate) rope["truncate"] = false;
  return rope;
}

}  // namespace crossply
