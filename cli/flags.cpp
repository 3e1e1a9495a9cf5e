#include "cli/flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <type_traits>

#include "cli/format.h"
#include "cli/other_names.h"
#include "engine/check.h"
#include "engine/numbers.h"

namespace crossply {

Flag Flag::required() const { return option_->required(); }
Flag Flag::needs(Flag other) const { return option_->needs(other.option_); }
Flag Flag::excludes(Flag other) const { return option_->excludes(other.option_); }
Flag Flag::group(const std::string& name) const { return option_->group(name); }
Flag Flag::description(const std::string& text) const { return option_->description(text); }
Flag Flag::default_str(const std::string& text) const { return option_->default_str(text); }
Flag Flag::take_all() const { return option_->multi_option_policy(CLI::MultiOptionPolicy::TakeAll); }
Flag Flag::one_each() const { return option_->allow_extra_args(false); }

int64_t read_integer(const std::string& name, const std::string& text, int64_t least, int64_t most) {
  const auto value = parse_integer(text);
  if (!value || *value < least || *value > most)
    refuse_value(name, str("'", text, "' is not an integer from ", least, " to ", most));
  return *value;
}

double read_number(const std::string& name, const std::string& text, double least, double most) {
  const auto value = parse_number(text);
  if (!value || *value < least || *value > most)
    refuse_value(name, str("'", text, "' is not a number from ", least,
                           most < max_number ? str(" to ", most) : std::string(" on")));
  return *value;
}

bool read_truth(const std::string& name, const std::string& text) {
  const auto value = parse_truth(text);
  if (!value) refuse_value(name, str("'", text, "' is neither true nor false"));
  return *value;
}

void refuse_value(const std::string& name, const std::string& why) { throw CLI::ValidationError(name, why); }

bool is_flag_error(const std::exception& error) { return dynamic_cast<const CLI::Error*>(&error) != nullptr; }

template <class T>
Flag add_integer(CLI::App& app, const std::string& name, T& variable, int64_t least, int64_t most,
                 const std::string& help) {
  auto set = [=, &variable](const std::string& text) {
    variable = static_cast<T>(read_integer(name, text, least, most));
  };
  const Flag flag = add_parsed(app, name, set, "INT", help);
  if constexpr (std::is_integral_v<T>) flag.default_str(std::to_string(variable));
  return flag;
}
template Flag add_integer(CLI::App&, const std::string&, int&, int64_t, int64_t, const std::string&);
template Flag add_integer(CLI::App&, const std::string&, int64_t&, int64_t, int64_t, const std::string&);
template Flag add_integer(CLI::App&, const std::string&, uint64_t&, int64_t, int64_t, const std::string&);
template Flag add_integer(CLI::App&, const std::string&, std::optional<int>&, int64_t, int64_t, const std::string&);
template Flag add_integer(CLI::App&, const std::string&, std::optional<uint64_t>&, int64_t, int64_t,
                          const std::string&);

Flag add_number(CLI::App& app, const std::string& name, double& variable, double least, double most,
                const std::string& help) {
  auto set = [=, &variable](const std::string& text) { variable = read_number(name, text, least, most); };
  return add_parsed(app, name, set, "FLOAT", help).default_str(str(variable));
}

Flag add_truth(CLI::App& app, const std::string& name, bool& variable, const std::string& help) {
  auto set = [=, &variable](const std::string& text) { variable = read_truth(name, text); };
  return add_parsed(app, name, set, "BOOL", help).default_str(variable ? "true" : "false");
}

Flag add_text(CLI::App& app, const std::string& name, std::string& variable, const std::string& type,
              const std::string& help) {
  return app.add_option(name, variable, help)->type_name(type)->default_str(variable);
}

Flag add_choice(CLI::App& app, const std::string& name, std::string& variable, const std::vector<std::string>& choices,
                const std::string& help) {
  auto check = [choices](const std::string& text) {
    if (std::find(choices.begin(), choices.end(), text) != choices.end()) return std::string();
    std::string known;
    for (const std::string& choice : choices) known += " " + choice;
    return str("'", text, "' is not one of:", known);
  };
  CLI::Option* option = add_text(app, name, variable, "NAME", help);
  return option->check(CLI::Validator(check, ""));
}

Flag add_parsed(CLI::App& app, const std::string& name, const std::function<void(const std::string&)>& set,
                const std::string& type, const std::string& help) {
  return app.add_option_function<std::string>(name, set, help)->type_name(type);
}

Flag add_texts(CLI::App& app, const std::string& name, std::vector<std::string>& variable, const std::string& type,
               const std::string& help) {
  return app.add_option(name, variable, help)->type_name(type);
}

Flag add_parsed_list(CLI::App& app, const std::string& name,
                     const std::function<void(const std::vector<std::string>&)>& set, const std::string& type,
                     const std::string& help) {
  return app.add_option_function<std::vector<std::string>>(name, set, help)->type_name(type);
}

Flag add_switch(CLI::App& app, const std::string& name, bool& variable, const std::string& help) {
  return app.add_flag(name, variable, help);
}

Flag add_listing(CLI::App& app, const std::string& name, std::string (*text)(), const std::string& help) {
  return app.add_flag_callback(
      name, [text] { throw CLI::CallForVersion(text(), 0); }, help);
}

Flag flag_named(CLI::App& app, const std::string& name) { return app.get_option(name); }
bool has_flag_named(const CLI::App& app, const std::string& name) { return app.get_option_no_throw(name) != nullptr; }
void remove_flag(CLI::App& app, const std::string& name) { app.remove_option(app.get_option(name)); }
bool is_given(const CLI::App& app, const std::string& name) { return app.count(name) > 0; }

std::set<std::string> given_flags(const CLI::App& app) {
  std::set<std::string> names;
  for (const CLI::Option* option : app.get_options())
    if (option->count() > 0) names.insert(option->get_name());
  return names;
}

std::vector<std::string> flags_in_group(const CLI::App& app, const std::string& group) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    if (option->get_group() == group) names.push_back(option->get_name());
  return names;
}

void stand_alone(CLI::App& app, Flag alone, const std::vector<std::string>& needed) {
  CLI::Option* flag = alone;
  for (CLI::Option* other : app.get_options([&](const CLI::Option* option) { return option != flag; }))
    flag->excludes(other);
  app.callback([&app, flag, needed] {
    for (const std::string& name : needed)
      if (flag->count() + app.count(name) == 0) throw CLI::RequiredError(name);
  });
}

void set_group(CLI::App& app, const std::string& name) { app.option_defaults()->group(name); }

void check_batch(int64_t batch, int64_t accumulate, int64_t seq_len) {
  const int64_t sequences = max_count / std::max<int64_t>(1, seq_len);
  if (accumulate > sequences || batch > sequences / accumulate)
    fail(Exit::usage, "--batch ", batch, accumulate > 1 ? str(" x --accumulate ", accumulate) : "", " sequences of ",
         seq_len, " tokens are more than a step can have; the most is ", sequences, " sequences");
}

// -----------------------------------------------------------------------------------------------------------------
// --help

namespace {

constexpr size_t screen = 80, names_width = 26;

// A name on the left and its description on the right, or below where the name is long.
std::string entry(const std::string& name, const std::string& about) {
  std::string out = "  " + name;
  if (about.empty()) return out + "\n";
  if (out.size() + 2 > names_width) out += "\n" + std::string(names_width, ' ');
  else out.resize(names_width, ' ');
  return out + wrap(about, screen - names_width, names_width) + "\n";
}

std::string describe(const CLI::Option& option) {
  std::string about = option.get_description();
  if (option.get_required()) about += " (required)";
  const std::string standard = option.get_default_str();
  return standard.empty() ? about : about + (about.empty() ? "" : " ") + "[" + standard + "]";
}

std::string name_of(const CLI::Option& option) {
  return option.get_name(false, true) + (option.get_type_size() != 0 ? " " + option.get_type_name() : "");
}

// The flags of a short help, each with the first paragraph of its description.
std::string short_entries(const CLI::App& app, const std::vector<std::string>& flags) {
  std::string out;
  for (const std::string& flag : flags) {
    const CLI::Option& option = *app.get_option(flag);
    const std::string about = describe(option);
    out += entry(name_of(option), about.substr(0, about.find('\n')));
  }
  return out;
}

std::string help_in_short(const CLI::App& app, const ShortHelp& help) {
  std::string out = "\nNeeded:\n" + short_entries(app, help.needed) + "\nCommon flags:\n" +
                    short_entries(app, help.common) + "\nExamples:\n";
  for (const std::string& example : help.examples) out += "  " + example + "\n";
  const size_t all =
      app.get_options([](const CLI::Option* option) { return option->get_group() != hidden_group; }).size();
  const bool has_presets = app.get_option_no_throw("--list-presets") != nullptr;
  return out + "\n" + app.get_name() + " --help-all lists all " + std::to_string(all) + " flags" +
         (has_presets ? ", --list-presets the settings of papers.\n" : ".\n") + wrap(app.get_footer(), screen, 0) +
         "\n";
}

// How many letters have to be changed, added, left out or swapped with the next one.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  std::iota(d[0].begin(), d[0].end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    d[i][0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

// What --help prints.
class Help : public CLI::FormatterBase {
 public:
  explicit Help(ShortHelp shortened = {}) : short_(std::move(shortened)) {}
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;

 private:
  ShortHelp short_;
};

std::string Help::make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const {
  std::string out = wrap(app->get_description(), screen, 0) + "\nUsage: " + (name.empty() ? app->get_name() : name) +
                    " [FLAGS]" + (app->get_subcommands({}).empty() ? "" : " [SUBCOMMAND]") + "\n";
  if (!short_.common.empty() && mode != CLI::AppFormatMode::All) return out + help_in_short(*app, short_);
  for (const std::string& group : app->get_groups()) {
    const auto options = app->get_options(
        [&](const CLI::Option* option) { return group != hidden_group && option->get_group() == group; });
    if (!options.empty()) out += "\n" + group + ":\n";
    for (const CLI::Option* option : options) out += entry(name_of(*option), describe(*option));
  }
  const auto parts = app->get_subcommands([](const CLI::App* part) { return !part->get_group().empty(); });
  if (!parts.empty()) out += "\nSubcommands:\n";
  for (const CLI::App* part : parts) out += entry(part->get_name(), part->get_description());
  return out + "\n" + wrap(app->get_footer(), screen, 0) + "\n";
}

}  // namespace

void set_help(CLI::App& app) { app.formatter(std::make_shared<Help>()); }
void set_short_help(CLI::App& app, ShortHelp help) { app.formatter(std::make_shared<Help>(std::move(help))); }

std::string unknown_flag(const CLI::App& program) {
  const auto parts = program.get_subcommands();
  const CLI::App& app = parts.empty() ? program : *parts[0];  // whose flags could have been meant
  for (const std::string& word : program.remaining(true)) {
    if (!word.starts_with("--")) continue;
    const std::string typed = word.substr(0, word.find('='));
    if (const std::string ours = flag_of_other_name(app, typed); !ours.empty())
      return str("unknown flag ", typed, "; here it is ", ours);
    std::string best, longer;
    size_t least = std::max<size_t>(2, (typed.size() - 2) / 3) + 1;
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) {
        const std::string known = "--" + name;
        if (known.ends_with(typed.substr(1))) longer += (longer.empty() ? "" : " or ") + known;
        const size_t apart = typed.size() > 4 && known.starts_with(typed) ? 0 : distance(typed, known);
        if (apart < least) least = apart, best = known;
      }
    }
    if (!longer.empty()) best = longer;  // an option that several connections have
    return str("unknown flag ", typed, best.empty() ? "" : str("; did you mean ", best, "?"));
  }
  return "";
}

}  // namespace crossply
