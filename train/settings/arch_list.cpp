#include "train/settings/arch_list.h"

#include <algorithm>

#include "models/combined.h"

namespace crossply {
namespace {

// Cuts at the separators that are not inside [].
std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  int depth = 0;
  for (const char c : text) {
    depth += (c == '[') - (c == ']');
    if (c == separator && depth == 0) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

// What stands behind @, off the text.
std::string take_word(ArchChoice& choice, const std::string& text) {
  const size_t at = text.rfind('@');
  if (at == std::string::npos) return text;
  const std::string word = text.substr(at + 1), number = word.starts_with("again") ? word.substr(5) : "";
  choice.leader = text.substr(0, at);
  choice.frozen = word == "frozen";
  if (word == "again") choice.again = 1;
  else if (number.size() == 1 && number[0] >= '2' && number[0] <= '9')
    choice.again = static_cast<uint64_t>(number[0] - '0');
  if (!choice.frozen && choice.again == 0)
    fail(Exit::usage, "--arch ", text, ": behind @ stands frozen, again, or again2 to again9");
  return choice.leader;
}

}  // namespace

ArchChoice parse_arch(const std::string& text) {
  ArchChoice choice{text, "", {}};
  const std::vector<std::string> parts = split(take_word(choice, text), ':');
  choice.arch = parts[0];
  const Architecture& architecture = find_architecture(choice.arch);
  std::string known;
  for (const Option& option : architecture.options) known += " " + option.key;
  for (size_t i = 1; i < parts.size(); ++i) {
    const size_t equals = parts[i].find('=');
    if (equals == std::string::npos)
      fail(Exit::usage, "--arch ", text, ": an option is written key=value, not '", parts[i], "'");
    std::string key = parts[i].substr(0, equals);
    std::ranges::replace(key, '-', '_');  // the trainer's flag of this name has hyphens
    const auto general = std::ranges::find(general_options(), key, &GeneralOption::key);
    if (general != general_options().end()) {
      Config kinds;
      if (!set_option(kinds, *general, parts[i].substr(equals + 1)))
        fail(Exit::usage, "--arch ", text, ": ", key, " cannot be '", parts[i].substr(equals + 1), "'");
    } else if (std::ranges::find(architecture.options, key, &Option::key) == architecture.options.end())
      fail(Exit::usage, "--arch ", text, ": ", choice.arch, " has no option '", key,
           "'; it has:", known.empty() ? " none" : known,
           ", and as all have: loop, block_norm, attention_window, logit_softcap and theirs");
    const size_t plus = parts[i].find('+');  // not that of 1e+3
    if (plus != std::string::npos && plus + 1 < parts[i].size() && std::isalpha(parts[i][plus + 1]))
      fail(Exit::usage, "--arch ", text, ": options stand behind the last name, as in mhc+lime:hc_mult=2");
    if (!choice.options.emplace(key, parts[i].substr(equals + 1)).second)
      fail(Exit::usage, "--arch ", text, " gives ", key, " twice");
  }
  return choice;
}

std::string ArchChoice::file_name() const {
  std::string name;
  for (const char c : text) {
    const bool safe =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-';
    if (safe) name += c;
    else if (name.back() != '-') name += '-';
  }
  if (name.back() == '-') name.pop_back();
  return name;
}

void ArchChoice::apply(Config& config) const {
  config.arch = arch;
  config.options.clear();
  for (const auto& [key, value] : options)
    if (const auto general = std::ranges::find(general_options(), key, &GeneralOption::key);
        general != general_options().end())
      set_option(config, *general, value);
    else config.options[key] = value;
}

std::vector<ArchChoice> parse_arch_list(const std::string& list, const std::string& backbone) {
  std::vector<ArchChoice> choices;
  auto add = [&](const std::string& text) {
    choices.push_back(parse_arch(text));
    const std::string name = choices.back().file_name();
    const ArchChoice& own = choices.back();
    const auto same = [&](const ArchChoice& choice) {  // both orders of a combination are one
      return choice.file_name() == name || (same_architecture(choice.arch, own.arch) && choice.options == own.options &&
                                            choice.frozen == own.frozen && choice.again == own.again);
    };
    if (std::any_of(choices.begin(), choices.end() - 1, same)) fail(Exit::usage, "--arch names ", text, " twice");
  };
  for (const std::string& text : split(list, ',')) {
    if (text != "all") add(text);
    else
      for (const Architecture& architecture : architectures())
        if (architecture.name != (backbone == "gpt2" ? "llama" : "gpt2")) add(architecture.name);
  }
  for (const ArchChoice& choice : choices)
    if (!choice.leader.empty() && std::ranges::find(choices, choice.leader, &ArchChoice::text) == choices.end())
      fail(Exit::usage, "--arch ", choice.text, " has the learning rates of ", choice.leader,
           ", which is not in the list: add it");
  return choices;
}

std::string arch_list_help() {
  std::string names;
  for (const Architecture& architecture : architectures()) names += " " + architecture.name;
  return "all, or ARCH[:key=value]... between commas; A+B: both in one model. ARCH:" + names;
}

}  // namespace crossply
