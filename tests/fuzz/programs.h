// The programs inside a fuzz target: each one's main, called like a function.
#pragma once

#include <algorithm>

#include <programs_inside.h>
#include "tests/fuzz/target.h"

namespace crossply::fuzz {

// The exit code of a program with these arguments.
inline int call(const std::string& program, std::vector<std::string> arguments) {
  setenv("OMP_WAIT_POLICY", "passive", 1);  // or bound_spinning() would start this process anew
  arguments.insert(arguments.begin(), program);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  return programs_inside().at(program)(static_cast<int>(arguments.size()), argv.data());
}

// The same, where the only wrong answers are a code that is not documented and the one that says "a bug".
inline void call_and_check(const std::string& program, const std::vector<std::string>& arguments) {
  const int code = call(program, arguments), documented[] = {0, 64, 65, 66, 71, 74, 77};
  require(std::find(std::begin(documented), std::end(documented), code) != std::end(documented),
          str(program, " ends with exit code ", code));
}

// The flags of a run of two steps of a model of a few hundred parameters.
inline std::vector<std::string> tiny_run(const std::string& out) {
  return {"--data",  "arith:3", "--train-samples", "8", "--test-samples",   "4", "--width", "4",
          "--ffn",   "4",       "--layers",        "1", "--heads",          "1", "--batch", "2",
          "--steps", "2",       "--eval-samples",  "2", "--answer-samples", "1", "--out",   out};
}

}  // namespace crossply::fuzz
