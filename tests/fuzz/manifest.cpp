// Any bytes as a checkpoint's manifest.

#include "engine/io/json.h"
#include "models/disk/checkpoint.h"
#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string run = scratch() + "/run", dir = run + "/step_00000001";
  if (!std::filesystem::exists(dir)) {
    std::filesystem::create_directories(dir);
    write_file(dir + "/weights", "abc");
    write_file(scratch() + "/outside", "abc");
  }
  write_file(dir + "/manifest.json", text_of(data, size));
  accept_or_refuse([&] {
    if (!is_valid_checkpoint(dir, nullptr)) return;
    const auto manifest = known_json(text_of(data, size));
    for (const auto& entry : manifest["files"]) require(entry["bytes"].is_number_unsigned(), "a size is no integer");
  });
  accept_or_refuse([&] { newest_valid_checkpoint(run); });
  accept_or_refuse([&] { resolve_model_dir(run); });
  accept_or_refuse([&] { remove_old_checkpoints(run, 1); });
  require(std::filesystem::exists(dir + "/weights") && std::filesystem::exists(scratch() + "/outside"),
          "reading a manifest removed a file");
  return 0;
}
