// A whole program inside the tests.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <omp.h>
#include <unistd.h>

#include <sstream>
#include <string>
#include <vector>

#include <programs_inside.h>
#include "engine/check.h"
#include "tests/support/temp_dir.h"

namespace crossply::test {

struct Outcome {
  int code;
  std::string output;  // standard output and error
};

// A program with its arguments, in this process, on one thread.
inline Outcome run_program_inside(const TempDir& scratch, std::vector<std::string> words) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string file = scratch.file("output");
  const int threads = omp_get_max_threads(), out = ::dup(1), err = ::dup(2);
  const int fd = ::open(file.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  std::fflush(stdout);
  ::dup2(fd, 1), ::dup2(fd, 2), ::close(fd);
  omp_set_num_threads(1);
  const int code = programs_inside().at(words[0])(static_cast<int>(words.size()), argv.data());
  omp_set_num_threads(threads);
  std::fflush(stdout);
  ::dup2(out, 1), ::dup2(err, 2), ::close(out), ::close(err);
  return {code, read_text(file)};
}

// train_ARCH with these arguments.
inline Outcome train(const TempDir& scratch, const std::vector<std::string>& arguments,
                     const std::string& arch = "llama") {
  std::vector<std::string> words = {"train_" + arch};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return run_program_inside(scratch, words);
}

// No line of what it said is wider than a terminal, but for those with a path.
inline void check_width(const Outcome& got, const TempDir& scratch) {
  std::istringstream lines(got.output);
  for (std::string line; std::getline(lines, line);)
    if (!has(line, scratch.path.string())) CHECK_MESSAGE(line.size() <= 80, line);
}

inline void check_outcome(const Outcome& got, Exit code, const std::string& says) {
  CHECK_MESSAGE(got.code == static_cast<int>(code), got.output);
  CHECK_MESSAGE(got.output.find(says) != std::string::npos, "no '" << says << "' in: " << got.output);
}

}  // namespace crossply::test
