// Any text as the command line of a program, one argument a line, the program's name first. Trainers and compare only
// plan; the others work on a tiny model, and what transplant makes goes each time.
#include <sstream>
#include <utility>

#include "data/tokenizer.h"
#include "tests/fuzz/programs.h"

using namespace crossply;
using namespace crossply::fuzz;

namespace {

// A number that means hours of honest work, instead of little work or a refusal.
bool is_large(const std::string& argument) {
  size_t digits = 0;
  for (const char c : argument) {
    digits = c >= '0' && c <= '9' ? digits + 1 : 0;
    if (digits == 4) break;
  }
  return digits == 4 && argument.size() < 18;
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static bool ready = false;
  if (!std::exchange(ready, true)) {
    std::filesystem::current_path(scratch());
    if (!std::filesystem::exists("run")) require(call("train_llama", tiny_run("run")) == 0, "the run fails");
    write_file("tokens.txt", "1 2 3 4 5 6 7 8 9");
    write_file("text.txt", std::string(2000, 'x'));
    Tokenizer::bytes().save(".");
    setenv("PYTHON", "none", 1);  // prepare would train a vocabulary
  }
  std::istringstream lines(std::string(text_of(data, std::min<size_t>(size, 100'000))));
  std::string program;
  std::vector<std::string> arguments;
  std::getline(lines, program);
  for (std::string line; std::getline(lines, line);) arguments.push_back(line.substr(0, line.find('\0')));
  if (!programs_inside().contains(program)) return 0;
  const bool plans = program == "compare" || program.starts_with("train_");
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool of_samples = arguments[i].find("samples") != std::string::npos ||
                            (i > 0 && arguments[i - 1].find("samples") != std::string::npos);
    if (is_large(arguments[i]) && (of_samples || !plans)) return 0;
  }
  if (plans) arguments.insert(arguments.end(), {"--out", "planned", "--dry-run"});
  if (program == "gradients") arguments.insert(arguments.end(), {"--out", "gradients.safetensors"});
  if (program == "prepare" && std::count(arguments.begin(), arguments.end(), "-") > 0) return 0;  // it would wait
  if (program == "prepare") arguments.insert(arguments.end(), {"--out", "prepared"});
  if (program == "transplant" || program == "average") arguments.insert(arguments.end(), {"--out", "made"});
  call_and_check(program, arguments);
  for (const char* made : {"made", "prepared", "prepared.partial"}) std::filesystem::remove_all(made);
  require(!std::filesystem::exists("planned"), "a dry run wrote something");
  return 0;
}
