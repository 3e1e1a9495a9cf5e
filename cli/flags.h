// Command-line flags: values that are read once and strictly, --help for 80 columns, suggestions for misspelt names.
// CLI11, which takes long to compile, stays out of here: who includes this sees of it two names.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "cli/bounds.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace crossply {

// The group of flags that --help leaves out. CLI11 does that for the group "", but then errors do not name the flag.
inline const std::string hidden_group = "hidden";

// A flag that a program has. What changes it returns it.
class Flag {
 public:
  Flag(CLI::Option* option) : option_(option) {}
  operator CLI::Option*() const { return option_; }
  Flag required() const;
  Flag needs(Flag other) const;
  Flag excludes(Flag other) const;
  Flag group(const std::string& name) const;
  Flag description(const std::string& text) const;
  Flag default_str(const std::string& text) const;  // what --help shows as the default
  Flag take_all() const;                            // of a list: may be given several times, and all count
  Flag one_each() const;                            // of a list: one value behind each name

 private:
  CLI::Option* option_;
};

// The one reading of a flag's text. What they throw, a parser tells as a wrong use of the flag.
int64_t read_integer(const std::string& name, const std::string& text, int64_t least, int64_t most);
double read_number(const std::string& name, const std::string& text, double least, double most);
bool read_truth(const std::string& name, const std::string& text);
[[noreturn]] void refuse_value(const std::string& name, const std::string& why);
// Whether an error is such a one.
bool is_flag_error(const std::exception& error);

// Flags of one value. The variable holds the default; an std::optional has none.
// T: an integer or an optional one, of those in flags.cpp.
template <class T>
Flag add_integer(CLI::App& app, const std::string& name, T& variable, int64_t least, int64_t most,
                 const std::string& help);
Flag add_number(CLI::App& app, const std::string& name, double& variable, double least, double most,
                const std::string& help);
Flag add_truth(CLI::App& app, const std::string& name, bool& variable, const std::string& help);
// type: what --help shows in the place of the value: FILE, DIR, NAME.
Flag add_text(CLI::App& app, const std::string& name, std::string& variable, const std::string& type,
              const std::string& help);
Flag add_choice(CLI::App& app, const std::string& name, std::string& variable, const std::vector<std::string>& choices,
                const std::string& help);
// set: is given the text, and may refuse_value().
Flag add_parsed(CLI::App& app, const std::string& name, const std::function<void(const std::string&)>& set,
                const std::string& type, const std::string& help);
// Flags of several values.
Flag add_texts(CLI::App& app, const std::string& name, std::vector<std::string>& variable, const std::string& type,
               const std::string& help);
Flag add_parsed_list(CLI::App& app, const std::string& name,
                     const std::function<void(const std::vector<std::string>&)>& set, const std::string& type,
                     const std::string& help);
// Flags without a value: one that is on where it is given, and one that prints a text and ends the program.
Flag add_switch(CLI::App& app, const std::string& name, bool& variable, const std::string& help);
Flag add_listing(CLI::App& app, const std::string& name, std::string (*text)(), const std::string& help);

// Flags that are there.
Flag flag_named(CLI::App& app, const std::string& name);
bool has_flag_named(const CLI::App& app, const std::string& name);
void remove_flag(CLI::App& app, const std::string& name);
bool is_given(const CLI::App& app, const std::string& name);
std::set<std::string> given_flags(const CLI::App& app);
// The names of those in a group of --help.
std::vector<std::string> flags_in_group(const CLI::App& app, const std::string& group);
// Makes a flag one that does something else than the program: it stands alone, and without it the needed ones must be
// given.
void stand_alone(CLI::App& app, Flag alone, const std::vector<std::string>& needed);
// The group of those that are added from now on; "Options" at first.
void set_group(CLI::App& app, const std::string& name);

// Throws Exit::usage, with the largest number of sequences, if a batch has more tokens than any machine could take.
void check_batch(int64_t batch, int64_t accumulate, int64_t seq_len);

// What most users need of a program with many flags: those that it needs, at most ten others, two examples.
struct ShortHelp {
  std::vector<std::string> needed, common, examples;
};

// From now on --help has 80 columns: the flags by group, in the order in which the groups were first used. With a short
// help it is only that; --help-all prints the flags then.
void set_help(CLI::App& app);
void set_short_help(CLI::App& app, ShortHelp help);

// After a failed parse: "unknown flag --stpes; did you mean --steps?", or "" if no flag was unknown.
// Behind a subcommand only its flags are suggested.
std::string unknown_flag(const CLI::App& app);

}  // namespace crossply
