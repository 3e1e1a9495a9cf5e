#include "train/settings/gpus.h"

#include <algorithm>
#include <cctype>

#include "engine/check.h"

namespace crossply {

// NVIDIA's data sheets of the SXM modules: dense FLOP/s of bf16 on tensor cores and of fp32 without them, memory and
// its rate, NVLink in one direction (450 GB/s of an H100 or H200, 300 of an A100, 900 of a B200). Attained: 7/9 of
// NVLink, and 46 of the 50 GB/s of a card of 400 Gb/s, as nccl-tests shows for NDR (NVIDIA/nccl-tests issue 290); the
// A100's systems have cards of 200 Gb/s. For A100 and B200 the same shares are assumed.
const std::vector<Gpu>& gpus() {
  static const std::vector<Gpu> all = {
      {"h100", 989e12, 67e12, 80e9, 3.35e12, 350e9, 46e9},
      {"h200", 989e12, 67e12, 141e9, 4.8e12, 350e9, 46e9},
      {"a100", 312e12, 19.5e12, 80e9, 2.04e12, 233e9, 23e9},
      {"b200", 2250e12, 75e12, 180e9, 8e12, 700e9, 46e9},
  };
  return all;
}

std::vector<std::string> gpu_names() {
  std::vector<std::string> names;
  for (const Gpu& gpu : gpus()) names.push_back(gpu.name);
  return names;
}

const Gpu& find_gpu(const std::string& name) {
  const auto gpu = std::find_if(gpus().begin(), gpus().end(), [&](const Gpu& one) { return one.name == name; });
  CHECK_THAT(gpu != gpus().end(), "no GPU '", name, "'");
  return *gpu;
}

double peak_flops(const std::string& description, Dtype dtype) {
  struct Peak {
    const char* name;
    double bf16, fp32;
  };
  const auto sxm = [](const char* name, const char* gpu) { return Peak{name, find_gpu(gpu).bf16, find_gpu(gpu).fp32}; };
  static const Peak peaks[] = {sxm("A100", "a100"),  {"H100 PCIe", 756e12, 51e12}, {"H100 NVL", 835e12, 60e12},
                               sxm("H100", "h100"),  {"H200 NVL", 835e12, 60e12},  sxm("H200", "h200"),
                               sxm("GH200", "h200"), sxm("B200", "b200")};
  const auto in_word = [&](size_t i) {
    return i < description.size() && std::isalnum(static_cast<unsigned char>(description[i])) != 0;
  };
  for (const Peak& peak : peaks)
    if (const size_t at = description.find(peak.name); at != std::string::npos)
      if (!in_word(at - 1) && !in_word(at + std::string(peak.name).size()))
        return dtype == Dtype::bf16 ? peak.bf16 : peak.fp32;
  return 0;
}

}  // namespace crossply
