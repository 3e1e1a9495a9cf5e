#include "models/registry.h"

#include "engine/printable.h"

namespace crossply {

std::vector<Architecture>& architectures() {
  static std::vector<Architecture> all = {
      {"llama", "every layer reads the layer below", {}, [](const Config&) { return std::make_unique<Connection>(); }},
      {"gpt2", "GPT-2: the same with its own block", {}, [](const Config&) { return std::make_unique<Connection>(); }},
      lime_architecture(),
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
      relay_architecture(),
  };
  return all;
}

const Architecture& find_architecture(const std::string& name, Exit code, const std::string& where) {
  std::string known;
  for (const Architecture& architecture : architectures()) {
    if (architecture.name == name) return architecture;
    known += " " + architecture.name;
  }
  fail(code, where, ": unknown architecture '", excerpt(name), "'; known:", known);
}

void refuse_beside_other(const std::string& key, const std::string& chooser, const std::string& choice,
                         const Config& config) {
  const std::string& chosen = config.options.at(chooser);
  if (chosen == choice) return;
  for (const Option& option : find_architecture(config.arch).options)
    if (option.key == key && option.default_value != config.options.at(key))
      fail(Exit::usage, config.arch, ": ", key, " is for ", chooser, " ", choice, ", and this is ", chosen);
}

}  // namespace crossply
