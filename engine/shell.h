// Commands to be copied into a shell.
#pragma once

#include <string>

namespace crossply {

// A word as a shell (bash, zsh, ksh) takes it back, in one line and safe for a terminal, whatever bytes it has.
std::string shell_word(const std::string& text);

}  // namespace crossply
