// Errors: one exception type that carries the process exit code, and CHECK for what must hold inside the program.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace crossply {

// The exit codes every program documents in --help.
enum class Exit : int {
  done = 0,
  usage = 64,       // wrong flags or flag values
  bad_data = 65,    // a file is there, but its contents are wrong
  no_input = 66,    // a file that was asked for is not there
  internal = 70,    // a bug in crossply
  device = 71,      // the device is missing or failed
  io = 74,          // reading or writing failed: permission, full disk
  stopped = 75,     // stopped on request, with a valid checkpoint: start again with --resume
  peer_lost = 76,   // another process of the job is gone or silent: start again with --resume
  not_finite = 77,  // the loss or the gradient became NaN or infinite
};

struct Error : std::runtime_error {
  Error(Exit exit_code, const std::string& message) : std::runtime_error(message), code(exit_code) {}
  Exit code;
};

// Concatenates anything that can be printed: str("layer ", 3, " of ", 4).
template <class... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  out.precision(9);
  (out << ... << args);
  return out.str();
}

template <class... Args>
[[noreturn]] void fail(Exit code, const Args&... args) {
  throw Error(code, str(args...));
}

}  // namespace crossply

// For the program's own promises (shapes, states). Bad input from outside gets fail() with its own words instead.
#define CHECK_THAT(condition, ...)                                          \
  do {                                                                      \
    if (!(condition))                                                       \
      ::crossply::fail(::crossply::Exit::internal, __FILE__, ":", __LINE__, \
                       ": " #condition " is false: ", __VA_ARGS__);         \
  } while (0)
