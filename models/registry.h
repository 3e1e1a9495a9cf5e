// The architectures by name: what they mean, which options they have, how to make their connection.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/connection.h"

namespace crossply {

// What gives an option its effect: another option with one of these values; no values: any but its default.
struct OptionNeed {
  std::string key;
  std::vector<std::string> values = {};
  std::string only_for = "";  // this value of the option itself needs it, others do not; "": all of them
};

// A key of config.json's "crossply" object, and a flag of the trainer by the same name; where every trainer has a flag
// of that name already, the architecture's stands in front (--sla-heads).
struct Option {
  std::string key;
  std::string default_value;  // the default, as it would stand in JSON; a text without quotes
  std::string help;
  std::vector<std::string> choices;  // of a text; empty for numbers, truth values and lists
  std::vector<OptionNeed> needs = {};
  std::string instead_of = "";  // a flag of the trainer that has no effect unless this option has its default
};

struct Architecture {
  std::string name;
  std::string meaning;  // one line
  std::vector<Option> options;
  // Throws Exit::usage for options that contradict each other.
  std::function<std::unique_ptr<Connection>(const Config&)> make;
  bool draft = false;  // tests ask for no numbers that were worked out on paper
};

// Each in the file of its name; lime_static and lime_dynamic in lime_static.cpp, ala in sla.cpp.
Architecture lime_architecture();
Architecture lime_static_architecture();
Architecture lime_dynamic_architecture();
Architecture hyper_architecture();
Architecture vertical_architecture();
Architecture sla_architecture();
Architecture ala_architecture();
Architecture resformer_architecture();
Architecture satformer_architecture();
Architecture denseformer_architecture();
Architecture mudd_architecture();
Architecture attnres_architecture();
Architecture kv_share_architecture();
Architecture mhc_architecture();
Architecture shortcuts_architecture();
Architecture gated_streams_architecture();
Architecture gemma3n_architecture();
Architecture depth_attention_architecture();
Architecture moda_architecture();
Architecture relay_architecture();

std::vector<Architecture>& architectures();  // tests add some of their own
// Throws `code`, naming `where` and the known architectures.
const Architecture& find_architecture(const std::string& name, Exit code = Exit::usage,
                                      const std::string& where = "--arch");

// An option that has no effect, because this need is not met.
struct IdleOption {
  std::string key;
  bool is_default;
  OptionNeed need;
};
// Those of a configuration that Config::check() has completed.
std::vector<IdleOption> idle_options(const Config& config);
// A note for each of them that has not its default; "" if there is none. where: the file that has them, or what else.
std::string note_idle_options(const Config& config, const std::string& where);
// "suffix", "alternate or list": the values that a need asks for; "" for any but the default.
std::string wanted_values(const OptionNeed& need);

}  // namespace crossply
