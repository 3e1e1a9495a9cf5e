// Any bytes as one file of a run directory, whose name is the first line of the input: the run is scored, asked and
// resumed. The manifest says that the file is as it was written.

#include "engine/io/json.h"
#include "engine/io/sha256.h"
#include "tests/fuzz/programs.h"

using namespace crossply;
using namespace crossply::fuzz;

namespace {

namespace fs = std::filesystem;

void list_in_manifest(const std::string& dir, const std::string& name, std::string_view contents) {
  const std::string path = dir + "/manifest.json";
  auto manifest = known_json(read_file(path));
  Sha256 hash;
  hash.update(contents.data(), contents.size());
  manifest["files"][name] = {{"bytes", contents.size()}, {"sha256", hash.hex()}};
  write_file(path, json_text(manifest));
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string whole = scratch() + "/whole", run = scratch() + "/run", step = run + "/step_00000002";
  if (!fs::exists(whole)) require(call("train_llama", tiny_run(whole)) == 0, "the run fails");
  const std::string_view input = text_of(data, size);
  const size_t end = input.find('\n');
  if (end == std::string_view::npos) return 0;
  const std::string name(input.substr(0, end));
  const std::string_view contents = input.substr(end + 1);
  const bool of_run = name == "metrics.jsonl" || name == "flags.json";
  if (!of_run && name != "train_state.json" && name != "config.json" && name != "tokenizer.json" &&
      name != "optimizer.index.json")
    return 0;
  fs::remove_all(run);
  fs::copy(whole, run, fs::copy_options::recursive);
  write_file((of_run ? run : step) + "/" + name, contents);
  if (!of_run) list_in_manifest(step, name, contents);
  if (!of_run && name != "config.json")  // which can ask for any amount of memory
    call_and_check("evaluate", {"--model", run, "--data", "arith:3", "--train-samples", "8", "--test-samples", "4",
                                "--samples", "1", "--batch", "1", "--answers", "1"});
  if (name == "tokenizer.json") call_and_check("generate", {"--model", run, "--prompt", "1 + 2 =", "--max-new", "3"});
  auto flags = tiny_run(run);
  flags.push_back("--resume");
  call_and_check("train_llama", flags);
  return 0;
}
