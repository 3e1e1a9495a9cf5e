// Commands to be copied into a shell.
#pragma once

#include <string>

namespace crossply {

// A word as a shell takes it back.
std::string shell_word(const std::string& text);

}  // namespace crossply
