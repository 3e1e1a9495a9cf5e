// Libraries opened at run time: where they are looked for, and what is said where they are not.
#include "kernels/cuda/library.h"

#include <dlfcn.h>
#include <doctest/doctest.h>

#if CROSSPLY_CUDA
#include <cublasLt.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;
namespace fs = std::filesystem;

namespace {

// A variable of the environment until the end of the test.
struct Environment {
  std::string name;
  std::optional<std::string> before;
  Environment(const char* variable, const std::string& value) : name(variable) {
    if (const char* old = std::getenv(variable)) before = old;
    ::setenv(variable, value.c_str(), 1);
  }
  ~Environment() {
    if (before) ::setenv(name.c_str(), before->c_str(), 1);
    else ::unsetenv(name.c_str());
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
};

}  // namespace

#ifdef __linux__
TEST_CASE("library: CUDA's are looked for beside the program, in CUDA_HOME and in the Pythons of PATH, in this order") {
  const TempDir dir;
  const std::string pip = dir.file("python/lib/python3.12/site-packages/nvidia/cu13/lib");
  const std::string own = dir.file("home/.local/lib/python3.9/site-packages/nvidia/cublas/lib");
  fs::create_directories(pip);
  fs::create_directories(own);
  fs::create_directories(dir.path / "python" / "bin");
  fs::create_directories(dir.path / "links");
  fs::create_symlink("../python/bin/python3.12", dir.path / "links" / "python3");
  fs::create_symlink("/usr/bin/of_no_machine/python3", dir.path / "python" / "bin" / "python3.12");
  const Environment cuda("CUDA_HOME", dir.file("cuda")), home("HOME", dir.file("home"));
  const Environment path("PATH", "relative:" + dir.file("nothing/bin") + ":" + dir.file("links"));
  const std::vector<std::string> folders = cuda_library_folders();
  const fs::path program = fs::canonical("/proc/self/exe");
  const std::vector<std::string> want = {(program.parent_path().parent_path() / "lib").string(),
                                         dir.file("cuda/lib64"),
                                         dir.file("cuda/lib"),
                                         "/usr/local/cuda/lib64",
                                         "/usr/local/cuda/lib",
                                         pip,
                                         own};
  CHECK(folders == want);
}
#endif

TEST_CASE("library: one that is nowhere, or cannot be loaded, ends with every place and what to do") {
  const TempDir dir;
  const std::string name = "libof_no_machine.so.13";
  write_text(dir.file(name), "not a library");
  check_fails(Exit::device,
              {"cannot open " + name, "the loader: ", dir.file("empty") + ": none there", dir.file(name) + ": ",
               ". Install it."},
              [&] {
                open_library(name, {dir.file("empty"), dir.path.string()}, "Install it.");
              });
}

#ifdef __GLIBC__
TEST_CASE("library: the first that can be loaded is taken, and a function that it lacks is named") {
  const TempDir dir;
  fs::create_directories(dir.path / "good");
  void* math = ::dlopen("libm.so.6", RTLD_NOW | RTLD_LOCAL);
  REQUIRE(math != nullptr);
  Dl_info found;
  REQUIRE(::dladdr(::dlsym(math, "cos"), &found) != 0);
  fs::copy_file(found.dli_fname, dir.path / "good" / "libof_no_machine.so");
  write_text(dir.file("libof_no_machine.so"), "not a library");
  void* library = open_library("libof_no_machine.so", {dir.file("none"), dir.path.string(), dir.file("good")}, "");
  const auto cosine = reinterpret_cast<double (*)(double)>(find_function(library, "cos", "version 13"));
  CHECK(cosine(0) == 1);
  CHECK(reinterpret_cast<void*>(cosine) != ::dlsym(math, "cos"));
  check_fails(Exit::device, {"version 13 has no function of_no_library"},
              [&] { find_function(library, "of_no_library", "version 13"); });
}
#endif

#if CROSSPLY_CUDA
TEST_CASE("library: cuBLASLt is of the major version that this was compiled with, or its error says what to do") {
  size_t version = 0;
  const Error error = error_of([&] { version = cublasLtGetVersion(); });
  if (error.code == Exit::done) {
    MESSAGE("cuBLASLt " << version);
    CHECK(version / 10000 == CUBLAS_VER_MAJOR);
    CHECK(std::string(cublasLtGetStatusString(CUBLAS_STATUS_NOT_SUPPORTED)) != "");
    return;
  }
  MESSAGE(std::string(error.what()));
  CHECK(error.code == Exit::device);
  for (const std::string& part :
       {std::string("LD_LIBRARY_PATH"), std::string("CUDA_HOME"), str("libcublasLt.so.", CUBLAS_VER_MAJOR)})
    CHECK_MESSAGE(has(error.what(), part), part);
}
#endif
