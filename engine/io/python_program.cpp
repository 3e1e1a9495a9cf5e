#include "engine/io/python_program.h"

#include <cstdlib>
#include <sstream>

namespace crossply {

std::string python_program() {
  const char* named = std::getenv("PYTHON");
  return named != nullptr && *named != '\0' ? named : "python3";
}

void clean_python_path() {
  const char* given = std::getenv("PYTHONPATH");
  if (given == nullptr) return;
  std::istringstream parts(given);
  std::string kept;
  for (std::string part; std::getline(parts, part, ':');)
    if (!part.empty()) kept += (kept.empty() ? "" : ":") + part;
  if (kept != given) ::setenv("PYTHONPATH", kept.c_str(), 1);
}

}  // namespace crossply
