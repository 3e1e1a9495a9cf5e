// What the fuzz targets share. A target is one file with LLVMFuzzerTestOneInput; driver.cpp or libFuzzer feeds it.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace crossply::fuzz {

// A directory of this process, gone at its end: in TMPDIR if that is set, otherwise in memory where that is possible.
inline const std::string& scratch() {
  struct Directory {
    std::string path;
    Directory() {
      const bool memory = std::getenv("TMPDIR") == nullptr && ::access("/dev/shm", W_OK) == 0;
      path = (memory ? "/dev/shm" : std::filesystem::temp_directory_path().string()) + "/crossply-fuzz-XXXXXX";
      if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("cannot create " + path);
    }
    ~Directory() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
  static const Directory directory;
  return directory.path;
}

inline std::string_view text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

inline void write_file(const std::string& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush())
    throw std::runtime_error("cannot write " + path);
}

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// An input is fine if it is accepted, or refused by an Error that does not call it a bug of crossply. Anything else
// leaves here and ends the process.
template <class F>
void accept_or_refuse(F&& body) {
  try {
    body();
  } catch (const Error& error) {
    if (error.code == Exit::internal) throw;
  }
}

inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::logic_error(what);
}

}  // namespace crossply::fuzz
