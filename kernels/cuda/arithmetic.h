// What decides the last digits of a GPU's numbers beside a run's settings: the versions of what computes them, and the
// algorithms that products took. cuBLASLt offers several for a product, which add in different orders; the fastest is
// found by timing, which may end otherwise the next time. So the choices are kept here, one table for the process, from
// which a checkpoint takes them and a resumed run gets them back. In the emulator, where nothing is timed, the order of
// a sum is drawn by lot instead.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace crossply {

// All that an algorithm for a product may depend on, in the order of kind_of (kernels/block/products.cu).
using ProductKind = std::array<int64_t, 17>;

// An algorithm: cuBLASLt's own bytes, which it promises to take back in the same version; in the emulator, an order.
#if CROSSPLY_CUDA
constexpr size_t choice_bytes = 64;
#else
constexpr size_t choice_bytes = 1;
#endif
using Choice = std::array<uint8_t, choice_bytes>;

// GPU, driver, CUDA runtime, cuBLASLt, attention's kernels: by what it is of, a version. Throws Exit::device.
std::map<std::string, std::string> gpu_versions();

// Null where this kind has none yet. Choices stay where they are until forget_choices.
const Choice* find_choice(const ProductKind& kind);
const Choice& keep_choice(const ProductKind& kind, const Choice& choice);

// The whole table as text: the kind's numbers with spaces between, and the choice in hexadecimal digits.
std::map<std::string, std::string> choices_as_text();
// Adds such a table, whose choices replace those for the same kinds. Throws Exit::bad_data, with `where`, and leaves
// the table as it was, where something else than kinds and choices is in it.
void take_choices(const std::map<std::string, std::string>& text, const std::string& where);
void forget_choices();  // as in a new process

// An algorithm for a product, whose size is said in errors. Of what ask(true) offers, best guess first, or where that
// is nothing, of what ask(false) does, which makes fewer wishes: the one that takes the least of time(offers), where
// that is clearly less than the first one's; otherwise the first, so that noise seldom decides. Infinite: could not be
// run; no times: nothing could be tried. Throws Exit::device where nothing is offered.
Choice choose(const std::string& size, const std::function<std::vector<Choice>(bool all_wishes)>& ask,
              const std::function<std::vector<float>(const std::vector<Choice>& offers)>& time);

}  // namespace crossply
