// Commands to be copied into a shell.
#pragma once

#include <string>

namespace crossply {

// A word as a shell (bash, zsh, ksh) takes it back, in one line and safe for a terminal, whatever bytes it has.
std::string shell_word(const std::string& text);

// The command that calls a program. called: argv[0] of this one, "build/compare" or "crossply compare". name: another
// program of the same place.
std::string shell_command(const std::string& called, const std::string& name = "");

// What stands before the name of a program, where one file is all programs (dev/crossply.cpp): "crossply ", or "".
std::string before_name(const std::string& called);

}  // namespace crossply
