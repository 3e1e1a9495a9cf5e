// Any bytes as the record of a run, by which a comparison is planned anew.
#include "tests/fuzz/programs.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string dir = scratch() + "/recorded";
  if (!std::filesystem::exists(dir)) {
    std::vector<std::string> flags = tiny_run(dir);
    flags.insert(flags.end(), {"--arch", "llama,lime", "--seeds", "1,2", "--jobs", "1"});
    require(call("compare", flags) == 0, "the comparison fails");
  }
  write_file(dir + "/records/llama-lr-0.001-seed-1.json", text_of(data, size));
  call_and_check("compare", {"--resume", "--dry-run", "--out", dir});
  return 0;
}
