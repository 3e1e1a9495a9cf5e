// The program's own Python scripts (engine/io/python_files.h) as child processes at the other end of a pipe.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "engine/io/file.h"

namespace crossply {

// The exit code of scripts that miss a package.
constexpr int no_package = 3;

// Both ends close on exec.
void make_pipe(Descriptor& read, Descriptor& write);

enum class ScriptEnd { input, output };
// Starts the script of this name with one end of a pipe as its standard input or output. 0: there is no such Python.
// Where the script reads, it ends with this thread on Linux; where it writes, its pipe breaks.
pid_t start_script(const std::string& name, const std::vector<std::string>& arguments, ScriptEnd end, int pipe);

// The script's status, as waitpid tells it; after a signal to this process it is ended, by force if it does not listen.
int wait_for_script(pid_t pid);
// "exit code 1" or "signal 9".
std::string script_status(int status);

}  // namespace crossply
