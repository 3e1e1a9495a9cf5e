// Any bytes as the file of prompts that `generate` continues.
#include "tests/fuzz/programs.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string run = scratch() + "/run", prompts = scratch() + "/prompts";
  if (!std::filesystem::exists(run)) {
    write_file(scratch() + "/text", std::string(1000, 'a') + "\n");
    require(call("train_llama", {"--data",         "text:" + scratch() + "/text",
                                 "--seq",          "8",
                                 "--width",        "4",
                                 "--ffn",          "4",
                                 "--layers",       "1",
                                 "--heads",        "1",
                                 "--batch",        "2",
                                 "--steps",        "2",
                                 "--eval-samples", "2",
                                 "--out",          run}) == 0,
            "the run fails");
  }
  write_file(prompts, text_of(data, size));
  // --keep-last keeps the work small, whatever the number and the length of the prompts.
  for (const char* most : {"0", "2"})
    if (size < 1000 || *most == '2')
      call_and_check("generate", {"--model", run, "--prompts", prompts, "--keep-last", most, "--max-new", "1",
                                  "--batch", "64", "--stop", "a"});
  return 0;
}
