// What every program's main does around its work: parse flags, turn exceptions into one clear line and an exit code.
#pragma once

#include <functional>
#include <memory>

#include "cli/flags.h"
#include "engine/check.h"

namespace crossply {

const char* exit_code_help();

// What ends a program, as an Error: its own code, or that of what it stands for. remedy: what to do where memory is not
// enough.
Error error_of(const std::exception& error, const std::string& remedy);
// Such a remedy, by the flags that a program has.
std::string memory_remedy(const CLI::App& app);
inline const char* const training_memory_remedy =
    "use a smaller --batch with --accumulate, a shorter --seq, or a smaller model";

// The flags of a program, none yet.
class CommandLine {
 public:
  CommandLine(const std::string& about, const std::string& name);
  ~CommandLine();
  operator CLI::App&() { return *app_; }

 private:
  std::unique_ptr<CLI::App> app_;
};

// Calls `flags` to add the flags, parses argv, then runs `body`, whose result is the exit code.
int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& flags,
                const std::function<Exit()>& body);

// The same for a command line that stands in a file: parses these words. where: file and line. Throws Exit::usage, with
// `where`, for what is none.
void parse_words(CLI::App& app, const std::function<void()>& flags, const std::vector<std::string>& words,
                 const std::string& where);

}  // namespace crossply
