// Files that tests make: a directory of their own, contents in and out, and the error of what is done with them.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "engine/check.h"

namespace crossply::test {

// Neither a kill nor a reader tells a disk from memory, but in memory a save is so short that many are affordable.
inline std::filesystem::path memory_or_disk() {
  return std::filesystem::exists("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path();
}

// A directory that is gone at the end of the test.
struct TempDir {
  std::filesystem::path path;
  explicit TempDir(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    std::string name = (parent / "crossply-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string file(const std::string& name) const { return (path / name).string(); }
};

// The same for tests that save often.
struct Scratch : TempDir {
  Scratch() : TempDir(memory_or_disk()) {}
};

inline void write_text(const std::string& path, const std::string& contents) {
  std::ofstream out(path, std::ios::binary);
  out << contents;
  REQUIRE_MESSAGE(out.flush(), path);
}

inline std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE_MESSAGE(in.good(), path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The names of what is in a directory, in order.
inline std::vector<std::string> names_in(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Whether the text has every one of these parts, or none.
inline void check_has(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) CHECK_MESSAGE(has(text, part), "no \"" << part << "\" in: " << text);
}
inline void check_has_none(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) CHECK_MESSAGE(!has(text, part), "\"" << part << "\" in: " << text);
}

// How often the part stands in the text.
inline int64_t count_of(const std::string& text, const std::string& part) {
  int64_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// What this process has read from files so far, in bytes; 0 where the system does not count it.
inline int64_t bytes_read() {
  std::ifstream io("/proc/self/io");
  std::string name;
  int64_t bytes = 0;
  return io >> name >> bytes && name == "rchar:" ? bytes : 0;
}

// What `action` fails with; Exit::done if it does not.
template <class F>
Error error_of(F&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  return Error(Exit::done, "");
}

// Runs body, which must fail with this exit code and a message that holds every one of `parts`.
template <class F>
void check_fails(Exit code, const std::vector<std::string>& parts, F&& body) {
  const Error error = error_of(body);
  const std::string what = error.what();
  CHECK_MESSAGE(error.code == code, "exit code " << static_cast<int>(error.code) << ": " << what);
  check_has(what, parts);
}

}  // namespace crossply::test
