// Any bytes as the file of tokens that gradients reads.
#include "tests/fuzz/programs.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string run = scratch() + "/run", tokens = scratch() + "/tokens.txt";
  if (!std::filesystem::exists(run)) require(call("train_llama", tiny_run(run)) == 0, "the run fails");
  write_file(tokens, text_of(data, size));
  call_and_check("gradients", {"--model", run, "--tokens", tokens, "--batch", "1", "--seq", "3", "--out",
                               scratch() + "/gradients.safetensors"});
  return 0;
}
