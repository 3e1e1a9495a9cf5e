// What every program's main does around its work: parse flags, turn exceptions into one clear line and an exit code.
#pragma once

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>

#include "engine/check.h"
#include "engine/spin.h"

namespace crossply {

// For flags: an integer from `least` on, a finite number from `least` on. CLI11's own ranges let NaN and wrapped
// integers through.
inline CLI::Validator integer_from(int64_t least) {
  auto check = [least](const std::string& text) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool good = error == std::errc() && end == text.data() + text.size() && value >= least;
    return good ? std::string() : str("'", text, "' is not an integer of at least ", least);
  };
  return CLI::Validator(check, "");
}
inline CLI::Validator number_from(double least, double most = std::numeric_limits<double>::max()) {
  auto check = [least, most](const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (!text.empty() && *end == '\0' && value >= least && value <= most) return std::string();
    return str("'", text, "' is not a number of at least ", least,
               most < 1e300 ? str(" and at most ", most) : std::string());
  };
  return CLI::Validator(check, "");
}

inline const char* exit_code_help() {
  return "Exit codes: 0 done, 64 wrong usage, 65 bad data, 66 missing input, 70 internal error, 71 device failure,\n"
         "74 input/output failure, 75 stopped on request (start again with --resume), 77 loss not finite.";
}

// Calls `flags` to add the flags, parses argv, then runs `body`, whose result is the exit code.
inline int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& flags,
                       const std::function<Exit()>& body) {
  bound_spinning(argv);
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
    const Exit code = body();
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
      return report(Exit::io, "cannot write to standard output");
    return static_cast<int>(code);
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
