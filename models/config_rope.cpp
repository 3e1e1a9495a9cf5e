// The rotary keys of a LLaMA: which frequencies, and how they are stretched for longer sequences.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/json.h"
#include "engine/printable.h"
#include "models/config_keys.h"
#include "models/json_file.h"

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

// The share of each frequency that stays as it is, channel by channel (D/2).
std::vector<double> yarn_shares(const RopeScaling& s, double theta, int64_t D) {
  const auto length = static_cast<double>(s.original_max_position_embeddings), width = static_cast<double>(D);
  // The channel, not a whole one, whose pair turns so many times in the original length.
  const auto channel = [&](double turns) {
    return width * std::log(length / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
  };
  double low = channel(s.beta_fast), high = channel(s.beta_slow);
  if (s.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, width - 1);
  if (low == high) high += 0.001;
  std::vector<double> shares;
  for (int64_t j = 0; j < D / 2; ++j)
    shares.push_back(1 - std::clamp((static_cast<double>(j) - low) / (high - low), 0.0, 1.0));
  return shares;
}

std::vector<double> llama3_shares(const RopeScaling& s, const std::vector<double>& frequencies) {
  std::vector<double> shares;
  for (const double w : frequencies) {
    const double turns = static_cast<double>(s.original_max_position_embeddings) * w / (2 * std::numbers::pi);
    shares.push_back(std::clamp((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0));
  }
  return shares;
}

}  // namespace

std::vector<double> Config::rope_frequencies() const {
  std::vector<double> frequencies, shares;
  for (int64_t j = 0; j < head_dim / 2; ++j)
    frequencies.push_back(std::pow(rope_theta, -2.0 * static_cast<double>(j) / static_cast<double>(head_dim)));
  if (!rope_scaling) return frequencies;
  const RopeScaling& s = *rope_scaling;
  if (s.rope_type == "linear") shares.assign(frequencies.size(), 0);
  else shares = s.rope_type == "yarn" ? yarn_shares(s, rope_theta, head_dim) : llama3_shares(s, frequencies);
  for (size_t j = 0; j < frequencies.size(); ++j)
    frequencies[j] = (1 - shares[j]) * frequencies[j] / s.factor + shares[j] * frequencies[j];
  return frequencies;
}

double Config::rope_factor() const {
  if (!rope_scaling || rope_scaling->rope_type != "yarn") return 1;
  const RopeScaling& s = *rope_scaling;
  if (s.attention_factor) return *s.attention_factor;
  const auto factor = [&](double scale) { return s.factor <= 1 ? 1 : 0.1 * scale * std::log(s.factor) + 1; };
  const double own = s.mscale.value_or(0), all = s.mscale_all_dim.value_or(0);
  return own != 0 && all != 0 ? factor(own) / factor(all) : factor(1);
}

void check_rope(const Config& config, Exit code, const std::string& where) {
  if (config.head_dim % 2 != 0)
    fail(code, where, ": head_dim ", config.head_dim, " is odd; RoPE rotates pairs, so it must be even");
  if (!(config.rope_theta > 0) || !std::isfinite(config.rope_theta))
    fail(code, where, ": rope_theta must be positive and finite, is ", config.rope_theta);
  if (!config.rope_scaling) return;
  if (config.rope_scaling->rope_type == "yarn" && !(config.rope_theta > 1))
    fail(code, where, ": rope_type yarn needs a rope_theta above 1, is ", config.rope_theta);
  if (const double factor = config.rope_factor(); !(factor > 0) || !std::isfinite(factor))
    fail(code, where, ": \"rope_scaling\" leads to an attention_factor of ", factor, "; it must be positive");
}

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
