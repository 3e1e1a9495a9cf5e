// Not yet run on hardware: only in the emulator.
#include "kernels/cuda/arithmetic.h"

#include "engine/numbers.h"
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/hopper.h"

#if CROSSPLY_CUDA
#include <cublasLt.h>
#endif

namespace crossply {
namespace {

std::map<ProductKind, Choice>& choices() {
  static std::map<ProductKind, Choice> table;
  return table;
}

std::string text_of(const ProductKind& kind) {
  std::string text;
  for (const int64_t part : kind) text += str(text.empty() ? "" : " ", part);
  return text;
}

// By the generation that they are for, which also the environment decides.
std::string attention_kernels() { return has_hopper() ? "sm_90" : "sm_80"; }

constexpr std::string_view digits = "0123456789abcdef";

std::string text_of(const Choice& choice) {
  std::string text;
  for (const uint8_t byte : choice) text += {digits[byte / 16], digits[byte % 16]};
  return text;
}

bool parse(std::string_view text, ProductKind& kind) {
  for (size_t i = 0; i < kind.size(); ++i) {
    const size_t space = i + 1 < kind.size() ? text.find(' ') : text.size();
    if (space == std::string_view::npos) return false;
    const auto part = parse_integer(text.substr(0, space));
    if (!part) return false;
    kind.at(i) = *part;
    text.remove_prefix(std::min(space + 1, text.size()));
  }
  return true;
}

bool parse(std::string_view text, Choice& choice) {
  if (text.size() != 2 * choice.size()) return false;
  for (size_t i = 0; i < choice.size(); ++i) {
    const size_t high = digits.find(text[2 * i]), low = digits.find(text[2 * i + 1]);
    if (high == digits.npos || low == digits.npos) return false;
    choice.at(i) = static_cast<uint8_t>(16 * high + low);
  }
  return true;
}

}  // namespace

const Choice* find_choice(const ProductKind& kind) {
  const auto at = choices().find(kind);
  return at == choices().end() ? nullptr : &at->second;
}
const Choice& keep_choice(const ProductKind& kind, const Choice& choice) { return choices()[kind] = choice; }

std::map<std::string, std::string> choices_as_text() {
  std::map<std::string, std::string> text;
  for (const auto& [kind, choice] : choices()) text[text_of(kind)] = text_of(choice);
  return text;
}

void take_choices(const std::map<std::string, std::string>& text, const std::string& where) {
  std::map<ProductKind, Choice> taken;
  for (const auto& [kind_text, choice_text] : text) {
    ProductKind kind;
    Choice choice;
    if (!parse(kind_text, kind) || !parse(choice_text, choice))
      fail(Exit::bad_data, where, ": \"", kind_text, "\": \"", choice_text, "\" is no product of ", kind.size(),
           " numbers with its choice in ", 2 * choice.size(), " hexadecimal digits; resume from another checkpoint");
    taken[kind] = choice;
  }
  for (const auto& [kind, choice] : taken) keep_choice(kind, choice);
}

void forget_choices() { choices().clear(); }

Choice choose(const std::string& size, const std::function<std::vector<Choice>(bool all_wishes)>& ask,
              const std::function<std::vector<float>(const std::vector<Choice>& offers)>& time) {
  std::vector<Choice> offers = ask(true);
  if (offers.empty()) offers = ask(false);
  if (offers.empty()) fail(Exit::device, "cuBLASLt has no algorithm for ", size);
  if (offers.size() == 1) return offers[0];
  constexpr float clearly = 0.97f;
  const std::vector<float> times = time(offers);
  const auto least = std::min_element(times.begin(), times.end());
  const bool other = least != times.end() && *least < clearly * times.front();
  return offers[other ? static_cast<size_t>(least - times.begin()) : 0];
}

#if CROSSPLY_CUDA

// The driver by the CUDA version that it is for: a new one of its releases changes no machine code that is compiled
// already.
std::map<std::string, std::string> gpu_versions() {
  int device = 0, driver = 0, runtime = 0;
  cudaDeviceProp gpu;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaGetDeviceProperties(&gpu, device));
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
  return {{"GPU", str(gpu.name, ", compute capability ", gpu.major, ".", gpu.minor, ", ", gpu.multiProcessorCount,
                      " multiprocessors")},
          {"driver's CUDA version", std::to_string(driver)},
          {"CUDA runtime", std::to_string(runtime)},
          {"cuBLASLt", std::to_string(cublasLtGetVersion())},
          {"attention", attention_kernels()}};
}

#else

std::map<std::string, std::string> gpu_versions() {
  return {{"GPU", describe_gpu()}, {"attention", attention_kernels()}};
}

#endif

}  // namespace crossply
