// What every program's main does around its work: parse flags, turn exceptions into one clear line and an exit code.
#pragma once

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <new>

#include "engine/check.h"

namespace crossply {

inline const char* exit_code_help() {
  return "Exit codes: 0 done, 64 wrong usage, 65 bad data, 66 missing input, 70 internal error, 71 device failure,\n"
         "74 input/output failure, 75 stopped on request (start again with --resume), 77 loss not finite.";
}

// Calls `flags` to add the flags, parses argv, then runs `body`, whose result is the exit code.
inline int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& flags,
                       const std::function<Exit()>& body) {
  app.footer(exit_code_help());
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // a later flag replaces an earlier one
  auto report = [](Exit code, const char* message) {
    if (isatty(STDOUT_FILENO) == 1) std::printf("\r\033[K");  // over an unfinished status line
    std::fflush(stdout);
    std::fprintf(stderr, "error: %s\n", message);
    return static_cast<int>(code);
  };
  try {
    flags();
    app.parse(argc, argv);
    return static_cast<int>(body());
  } catch (const CLI::Success& success) {  // --help
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "error: %s\n%s --help lists the flags.\n", error.what(), app.get_name().c_str());
    return static_cast<int>(Exit::usage);
  } catch (const Error& error) {
    return report(error.code, error.what());
  } catch (const std::bad_alloc&) {
    return report(Exit::device, "out of memory; use a smaller --batch, --seq or model");
  } catch (const std::exception& error) {
    return report(Exit::internal, error.what());
  }
}

}  // namespace crossply
