// The Python files that programs need where there is no source tree.
#pragma once

#include <map>
#include <string>

namespace crossply {

// By name, "llama.py" (written by dev/embed_python.cmake).
const std::map<std::string, std::string>& python_files();

}  // namespace crossply
