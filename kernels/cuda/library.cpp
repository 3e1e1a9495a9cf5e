#include "kernels/cuda/library.h"

#include <dlfcn.h>
#include <glob.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "engine/check.h"
#include "engine/platform.h"

namespace fs = std::filesystem;

namespace crossply {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

// Where pip puts NVIDIA's libraries for a Python installed in `prefix`.
void add_packages(std::vector<std::string>& folders, const std::string& prefix) {
  glob_t found;
  if (glob((prefix + "/lib/python3*/*-packages/nvidia/*/lib").c_str(), 0, nullptr, &found) == 0)
    folders.insert(folders.end(), found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
}

// Of every Python that a file bin/python3 is, or is a link to: an environment's is itself a link to the system's.
void add_python(std::vector<std::string>& folders, const fs::path& bin) {
  std::error_code none;
  fs::path python = bin / "python3";
  for (int links = 0; links < 8 && fs::exists(fs::symlink_status(python, none)); ++links) {
    add_packages(folders, python.parent_path().parent_path().string());
    const fs::path target = fs::read_symlink(python, none);
    if (none) return;
    python = (python.parent_path() / target).lexically_normal();
  }
}

}  // namespace

std::vector<std::string> cuda_library_folders() {
  const fs::path program = own_program();
  std::vector<std::string> folders;
  if (!program.empty()) folders.push_back((program.parent_path().parent_path() / "lib").string());
  for (const std::string& cuda : {variable("CUDA_HOME"), std::string("/usr/local/cuda")})
    if (!cuda.empty()) folders.insert(folders.end(), {cuda + "/lib64", cuda + "/lib"});
  std::istringstream path(variable("PATH"));
  for (std::string bin; std::getline(path, bin, ':');)
    if (fs::path(bin).is_absolute()) add_python(folders, bin);
  if (const std::string home = variable("HOME"); !home.empty()) add_packages(folders, home + "/.local");
  return folders;
}

void* open_library(const std::string& file, const std::vector<std::string>& folders, const std::string& what_to_do) {
  if (void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  std::string tried = str("; tried: the loader: ", dlerror());
  for (const std::string& folder : folders) {
    const std::string path = folder + "/" + file;
    std::error_code ignored;
    if (!fs::exists(path, ignored)) {
      tried += str("; ", folder, ": none there");
      continue;
    }
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    tried += str("; ", dlerror());  // it names the file
  }
  fail(Exit::device, "cannot open ", file, tried, ". ", what_to_do);
}

void* find_function(void* library, const char* name, const std::string& version) {
  void* function = dlsym(library, name);
  if (function == nullptr) fail(Exit::device, version, " has no function ", name, "; install a newer one");
  return function;
}

}  // namespace crossply
