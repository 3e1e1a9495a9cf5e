// What every program's main does around its work: parse flags, turn exceptions into one clear line and an exit code.
#pragma once

#include <functional>

#include "cli/flags.h"
#include "engine/check.h"

namespace crossply {

const char* exit_code_help();

// What ends a program, as an Error: its own code, or that of what it stands for.
Error error_of(const std::exception& error);

// Calls `flags` to add the flags, parses argv, then runs `body`, whose result is the exit code.
int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& flags,
                const std::function<Exit()>& body);

}  // namespace crossply
