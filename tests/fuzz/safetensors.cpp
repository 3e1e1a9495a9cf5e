// Any bytes as a safetensors file. Most mutations break the length in front of the header, so that no other check is
// reached: such an input is tried again with the length of what looks like its header.
#include "engine/io/safetensors.h"

#include <cstring>

#include "tests/fuzz/target.h"

using namespace crossply;
using namespace crossply::fuzz;

namespace {

void try_file(const std::string& bytes) {
  const std::string path = scratch() + "/model.safetensors";
  write_file(path, bytes);
  accept_or_refuse([&] {
    const SafetensorsFile file(path);
    for (const TensorInfo& info : file.tensors()) {
      require(file.find(info.name) == &info, "find() gives another tensor");
      require(info.end - info.begin <= bytes.size(), "a tensor is larger than the file");
      std::vector<double> numbers(static_cast<size_t>(info.numel()));
      std::vector<float> in_f32(numbers.size());
      std::vector<char> raw(info.end - info.begin);
      file.read_raw(info, info.dtype, raw.data());
      accept_or_refuse([&] { file.read_f64(info, numbers.data()); });
      accept_or_refuse([&] { file.read_f32(info, in_f32.data()); });
    }
  });
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes(text_of(data, size));
  try_file(bytes);
  const size_t brace = bytes.find("}}");
  if (brace == std::string::npos || brace < 8) return 0;
  const uint64_t length = brace + 2 - 8;
  std::memcpy(bytes.data(), &length, sizeof length);
  try_file(bytes);
  return 0;
}
