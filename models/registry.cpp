#include "models/registry.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "engine/io/printable.h"
#include "models/combined.h"

namespace crossply {

std::vector<Architecture>& architectures() {
  static std::vector<Architecture> all = {
      {"llama", "every layer reads the layer below", {}, [](const Config&) { return std::make_unique<Connection>(); }},
      {"gpt2", "GPT-2: the same with its own block", {}, [](const Config&) { return std::make_unique<Connection>(); }},
      lime_architecture(),
#ifndef CROSSPLY_QUICK_START  // the program of `make run`, which is built before their kernels are
      lime_static_architecture(),
      lime_dynamic_architecture(),
      hyper_architecture(),
      vertical_architecture(),
      sla_architecture(),
      ala_architecture(),
      resformer_architecture(),
      satformer_architecture(),
      denseformer_architecture(),
      mudd_architecture(),
      attnres_architecture(),
      kv_share_architecture(),
      mhc_architecture(),
      shortcuts_architecture(),
      gated_streams_architecture(),
      gemma3n_architecture(),
      depth_attention_architecture(),
      moda_architecture(),
      relay_architecture(),
#endif
  };
  return all;
}

// Each is made once.
static const Architecture& find_combination(const std::string& name, Exit code, const std::string& where) {
  static std::map<std::string, Architecture> known;
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const auto found = known.find(name);
  return found != known.end() ? found->second
                              : known.emplace(name, combined_architecture(name, code, where)).first->second;
}

const Architecture& find_architecture(const std::string& name, Exit code, const std::string& where) {
  if (is_combined(name)) return find_combination(name, code, where);
  std::string known;
  for (const Architecture& architecture : architectures()) {
    if (architecture.name == name) return architecture;
    known += " " + architecture.name;
  }
#ifdef CROSSPLY_QUICK_START
  fail(code, where, ": quick_start has only", known, "; `make compare` has '", excerpt(name),
       "', if there is such one");
#endif
  if (code == Exit::usage) fail(code, where, ": unknown architecture '", excerpt(name), "'; known:", known);
  fail(code, where, ": this build does not know the architecture '", excerpt(name),
       "'; if it is newer than this build: make generate, or this program; known:", known);
}

std::vector<IdleOption> idle_options(const Config& config) {
  std::vector<IdleOption> idle;
  const std::vector<Option>& options = find_architecture(config.arch).options;
  const auto is_default = [&](const std::string& key) {
    const auto option = std::ranges::find(options, key, &Option::key);
    return option->default_value == config.options.at(key);
  };
  for (const Option& option : options)
    for (const OptionNeed& need : option.needs) {
      const std::string &value = config.options.at(option.key), &other = config.options.at(need.key);
      const bool concerned = need.only_for.empty() || need.only_for == value;
      const bool met = need.values.empty() ? !is_default(need.key) : std::ranges::count(need.values, other) > 0;
      if (concerned && !met) idle.push_back({option.key, is_default(option.key), need});
    }
  return idle;
}

std::string wanted_values(const OptionNeed& need) {
  std::string words;
  for (const std::string& value : need.values) words += (words.empty() ? "" : " or ") + value;
  return words;
}

std::string note_idle_options(const Config& config, const std::string& where) {
  std::string notes;
  for (const IdleOption& idle : idle_options(config)) {
    if (idle.is_default) continue;
    const std::string wanted = wanted_values(idle.need);
    notes += str("note: ", printable(where), ": ", idle.key, " ", excerpt(config.options.at(idle.key)),
                 " has no effect without ", idle.need.key, wanted.empty() ? "" : " ", wanted, "\n");
  }
  return notes;
}

}  // namespace crossply
