#include "cli/program.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <new>
#include <sstream>
#include <system_error>

#include "cli/needs.h"
#include "cli/spin.h"
#include "cli/standard_streams.h"
#include "cli/version.h"
#include "engine/cpu_check.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "engine/out_of_memory.h"
#include "engine/threads.h"

namespace crossply {

const char* exit_code_help() {
  return "Exit codes: 0 done, 64 wrong usage, 65 bad data, 66 missing input, 70 internal error, 71 device failure, "
         "74 input/output failure, 75 stopped on request (start again, with --resume where there is that flag), 76 "
         "another process of the job was lost (start again with --resume), 77 a loss or logits not finite.";
}

Error error_of(const std::exception& error, const std::string& remedy) {
  if (const auto* memory = dynamic_cast<const OutOfMemory*>(&error))
    return {memory->code, str(memory->what(), "; ", remedy)};
  if (const auto* ours = dynamic_cast<const Error*>(&error)) return *ours;
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return {Exit::device, "out of memory; " + remedy};
  if (const auto* files = dynamic_cast<const std::filesystem::filesystem_error*>(&error))
    return {Exit::io, str("cannot access ", files->path1().string(), ": ", files->code().message())};
  const auto* of_system = dynamic_cast<const std::system_error*>(&error);
  if (of_system != nullptr && of_system->code() == std::errc::resource_unavailable_try_again)
    return {Exit::device,
            "cannot start another thread: the system allows no more (ulimit -u, or the container's limit on "
            "processes); raise it, or end other programs"};
  return {Exit::internal, error.what()};
}

std::string memory_remedy(const CLI::App& app) {
  const auto has = [&](const std::string& flag) {
    const CLI::Option* option = app.get_option_no_throw(flag);
    return option != nullptr && option->get_group() != hidden_group;
  };
  if (has("--batch") && has("--accumulate") && has("--seq")) return training_memory_remedy;
  std::string smaller;
  for (const char* flag : {"--batch", "--batch-tokens", "--seq", "--length", "--sequences", "--jobs"})
    if (has(flag)) smaller += std::string(smaller.empty() ? "use a smaller " : ", ") + flag;
  if (has("--model")) smaller += smaller.empty() ? "use a smaller model" : " or model";
  return smaller.empty() ? "end other programs, or use a machine with more memory" : smaller;
}

CommandLine::CommandLine(const std::string& about, const std::string& name)
    : app_(std::make_unique<CLI::App>(about, name)) {}
CommandLine::~CommandLine() = default;

// A later flag replaces an earlier one.
static void take_last(CLI::App& app) { app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast); }

int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& flags,
                const std::function<Exit()>& body) {
  check_cpu();
  bound_spinning(argv);
  prepare_standard_streams();
  app.footer(exit_code_help());
  set_help(app);
  if (argc > 0) app.name(before_name(argv[0]) + app.get_name());
  app.set_help_all_flag("--help-all", "Print every flag and exit");
  app.set_version_flag(
      "--version", [&app] { return str(app.get_name(), " (crossply) ", version()); },
      "Print version and commit and exit");
  take_last(app);
  auto report = [](Exit code, const char* message) {
    if (takes_escape_codes(STDOUT_FILENO)) std::printf("\r\033[K");  // over an unfinished status line
    std::fflush(stdout);
    std::fprintf(stderr, "error: %s\n", printable(message).c_str());
    return static_cast<int>(code);
  };
  Exit code = Exit::done;
  try {
    flags();
    try {
      app.parse(argc, argv);
      check_needs(app);
      if (is_one_of_several()) take_quota();  // all would try all threads at once: ranks/launch.h does, with its share
      else if (const std::string note = choose_thread_count(); !note.empty())
        std::fprintf(stderr, "%s\n", note.c_str());
      code = body();
    } catch (const CLI::Success& success) {  // --help
      std::ostringstream help;
      app.exit(success, help, help);
      std::printf("%s", printable(help.str()).c_str());  // defaults may be of a flags.json
    }
    if (code == Exit::done) flush_standard_output();
    return static_cast<int>(code);
  } catch (const ReaderGone&) {
    return static_cast<int>(code);
  } catch (const CLI::ParseError& error) {
    const std::string unknown = unknown_flag(app);
    std::fprintf(stderr, "error: %s\n%s --help lists the flags.\n",
                 printable(unknown.empty() ? error.what() : unknown).c_str(), app.get_name().c_str());
    return static_cast<int>(Exit::usage);
  } catch (const std::exception& error) {
    const Error known = error_of(error, memory_remedy(app));
    return report(known.code, known.what());
  }
}

void parse_words(CLI::App& app, const std::function<void()>& flags, const std::vector<std::string>& words,
                 const std::string& where) {
  app.set_help_flag("");
  take_last(app);
  flags();
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 reads them from the end
    check_needs(app);
  } catch (const CLI::ParseError& error) {
    const std::string unknown = unknown_flag(app);
    fail(Exit::usage, where, ": ", unknown.empty() ? error.what() : unknown);
  } catch (const Error& error) {
    fail(error.code, where, ": ", error.what());
  }
}

}  // namespace crossply
