// Libraries that are opened when they are first needed, so that a program starts also where there are none.
#pragma once

#include <string>
#include <vector>

namespace crossply {

// Where CUDA's libraries may lie besides the loader's own path: the package of this program, CUDA_HOME, CUDA's usual
// folder, and where pip puts them for any python3 of PATH, and for the user.
std::vector<std::string> cuda_library_folders();

// Opens `file` from the loader's own path (LD_LIBRARY_PATH, ldconfig), else from the first of the folders that has one
// that can be loaded; it stays open. Throws Exit::device, with every place that was tried and what was wrong there, and
// then with what to do.
void* open_library(const std::string& file, const std::vector<std::string>& folders, const std::string& what_to_do);

// A function of such a library. Throws Exit::device, with the library's version, if that has none of this name.
void* find_function(void* library, const char* name, const std::string& version);

}  // namespace crossply
