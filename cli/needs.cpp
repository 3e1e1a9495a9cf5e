#include "cli/needs.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "engine/check.h"
#include "engine/numbers.h"
#include "engine/split.h"

namespace crossply {
namespace {

// CLI11 keeps the check of a flag's needs with the flag, under this name. It is switched off until all flags are read.
constexpr const char* check_of_needs = "needs";

// On the command line, or else by default: as a preset or a resumed run has it. Of a list between commas each item.
std::vector<std::string> values_of(const CLI::Option& flag) {
  const std::vector<std::string> given =
      flag.count() > 0 ? flag.reduced_results() : std::vector{flag.get_default_str()};
  std::vector<std::string> values;
  for (const std::string& value : given)
    for (const std::string& item : split_commas(value)) values.push_back(item);
  return values;
}

bool is_on(const std::string& value) {
  return !value.empty() && value != "false" && value != "[]" && parse_number(value) != 0.0;
}

bool same(const std::string& a, const std::string& b) {
  const auto number = parse_number(a);
  return a == b || (number && number == parse_number(b));
}

bool matches(const std::string& value, const std::string& wanted) {
  if (wanted.starts_with('!')) return !same(value, wanted.substr(1));
  return wanted.ends_with('*') ? value.starts_with(wanted.substr(0, wanted.size() - 1)) : same(value, wanted);
}

bool is_met(const CLI::App& app, const Need& need) {
  const CLI::Option* other = app.get_option_no_throw(need.flag);
  CHECK_THAT(other != nullptr, "there is no flag ", need.flag);
  const std::vector<std::string> values = values_of(*other);
  return std::any_of(values.begin(), values.end(), [&](const std::string& value) {
    return need.values.empty() ? is_on(value)
                               : std::any_of(need.values.begin(), need.values.end(),
                                             [&](const std::string& wanted) { return matches(value, wanted); });
  });
}

// "--schedule cosine|linear or --rounds other than 1".
std::string in_words(const std::vector<Need>& any_of) {
  std::string words;
  for (const Need& need : any_of) {
    words += (words.empty() ? "" : " or ") + need.flag;
    for (const std::string& value : need.values) {
      words += &value == &need.values[0] ? " " : "|";
      words += value.starts_with('!') ? "other than " + value.substr(1) : value;
    }
  }
  return words;
}

// What the flag misses first, in words; "" where its needs are met, or it has none.
std::string missing(CLI::Option& flag) {
  try {
    for (int i = 0;; ++i) {
      CLI::Validator check = *flag.get_validator(i);
      if (check.get_name() != check_of_needs) continue;
      std::string unused;
      if (std::string what = check.active()(unused); !what.empty()) return what;
    }
  } catch (const CLI::OptionNotFound&) {  // behind the last check
    return "";
  }
}

}  // namespace

Flag needs(CLI::App& app, Flag flag, const std::vector<Need>& any_of) {
  const auto unmet = [&app, any_of](std::string&) {
    const bool met = std::any_of(any_of.begin(), any_of.end(), [&](const Need& need) { return is_met(app, need); });
    return met ? std::string() : in_words(any_of);
  };
  CLI::Option* option = flag;
  option->description(option->get_description() + " (needs " + in_words(any_of) + ")");
  return option->check(CLI::Validator(unmet, "", check_of_needs).active(false));
}

void check_needs(CLI::App& app) {
  for (CLI::Option* flag : app.get_options({}))
    if (flag->count() > 0)
      if (const std::string what = missing(*flag); !what.empty())
        fail(Exit::usage, flag->get_name(), " has no effect without ", what, "; add that, or leave it out");
}

std::string notes_on_needs(CLI::App& app, const CLI::App& plain) {
  std::string notes;
  for (CLI::Option* flag : app.get_options({})) {
    const CLI::Option* usual = plain.get_option_no_throw(flag->get_name());
    const std::string value = flag->get_default_str();
    if (flag->count() > 0 || usual == nullptr || usual->get_default_str() == value || !is_on(value)) continue;
    if (const std::string what = missing(*flag); !what.empty())
      notes +=
          str("note: ", flag->get_name(), " ", value, " of the preset or the run has no effect without ", what, "\n");
  }
  return notes;
}

}  // namespace crossply
