// Any bytes as the results.json of a comparison, which is planned anew and drawn. Resuming it for real is left to the
// tests: an input may ask for any number of steps.
#include "tests/fuzz/programs.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string dir = scratch() + "/comparison";
  if (!std::filesystem::exists(dir)) {
    std::vector<std::string> flags = tiny_run(dir);
    flags.insert(flags.end(), {"--arch", "llama,lime", "--seeds", "1,2", "--jobs", "1"});
    require(call("compare", flags) == 0, "the comparison fails");
  }
  write_file(dir + "/results.json", text_of(data, size));
  call_and_check("compare", {"--resume", "--dry-run", "--out", dir});
  call_and_check("curves", {dir, "--loss", "train", "--out", scratch() + "/curves.svg"});
  return 0;
}
