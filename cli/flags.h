// Command-line flags: values that are read once and strictly, --help for 80 columns, suggestions for misspelt names.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/bounds.h"

namespace crossply {

// The group of flags that --help leaves out. CLI11 does that for the group "", but then errors do not name the flag.
inline const std::string hidden_group = "hidden";

// The one reading of a flag's text. Throw CLI::ValidationError with the range.
int64_t read_integer(const std::string& name, const std::string& text, int64_t least, int64_t most);
double read_number(const std::string& name, const std::string& text, double least, double most);
bool read_truth(const std::string& name, const std::string& text);

// Flags of one value. The variable holds the default; an std::optional has none.
// T: an integer or an optional one, of those in flags.cpp.
template <class T>
CLI::Option* add_integer(CLI::App& app, const std::string& name, T& variable, int64_t least, int64_t most,
                         const std::string& help);
CLI::Option* add_number(CLI::App& app, const std::string& name, double& variable, double least, double most,
                        const std::string& help);
CLI::Option* add_truth(CLI::App& app, const std::string& name, bool& variable, const std::string& help);
// type: what --help shows in the place of the value: FILE, DIR, NAME.
CLI::Option* add_text(CLI::App& app, const std::string& name, std::string& variable, const std::string& type,
                      const std::string& help);
CLI::Option* add_choice(CLI::App& app, const std::string& name, std::string& variable,
                        const std::vector<std::string>& choices, const std::string& help);
// --plan, for tests: not in --help.
void add_plan_flag(CLI::App& app, std::string& variable);

// Throws Exit::usage, with the largest number of sequences, if a batch has more tokens than any machine could take.
void check_batch(int64_t batch, int64_t accumulate, int64_t seq_len);

// What most users need of a program with many flags: those that it needs, at most ten others, two examples.
struct ShortHelp {
  std::vector<std::string> needed, common, examples;
};

// What --help prints, in 80 columns: the flags by group, in the order in which the groups were first used. Of a program
// with a short help only that; --help-all prints the flags then.
class Help : public CLI::FormatterBase {
 public:
  explicit Help(ShortHelp shortened = {}) : short_(std::move(shortened)) {}
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;

 private:
  ShortHelp short_;
};
// From now on --help of this program is short.
void set_short_help(CLI::App& app, ShortHelp help);

// After a failed parse: "unknown flag --stpes; did you mean --steps?", or "" if no flag was unknown.
// Behind a subcommand only its flags are suggested.
std::string unknown_flag(const CLI::App& app);

}  // namespace crossply
