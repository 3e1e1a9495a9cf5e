#include "cli/look.h"

#include <algorithm>
#include <iterator>

namespace crossply {
namespace {

// The colours of Okabe and Ito, which remain distinct for colour-blind readers, but for the yellow, too pale on white.
constexpr const char* colours[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"};
// Neighbours also differ in dash and mark, for print.
constexpr const char* dashes[] = {"", "7 3", "2 2", "9 3 2 3"};
static_assert(std::size(colours) * std::size(dashes) == number_of_looks);

// A place is a look. Those that are often in one figure stand near each other. A new architecture goes to the end.
constexpr const char* known[] = {"llama",     "lime",      "hyper",         "resformer",   "denseformer",
                                 "vertical",  "mudd",      "gpt2",          "lime_static", "lime_dynamic",
                                 "satformer", "sla",       "ala",           "attnres",     "kv_share",
                                 "mhc",       "shortcuts", "gated_streams", "relay",       "depth_attention",
                                 "gemma3n",   "moda"};

// "lime:window=2" and "lime lr 0.001" are "lime".
std::string architecture_of(const std::string& name) {
  return name.substr(0, name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_"));
}

}  // namespace

const char* colour_of_look(size_t look) { return colours[look % std::size(colours)]; }
const char* dash_of_look(size_t look) { return dashes[look % std::size(dashes)]; }
size_t mark_of_look(size_t look) { return look % std::size(dashes); }

int same_colour(int look, int n) {
  return static_cast<int>((static_cast<size_t>(look) + static_cast<size_t>(n) * std::size(colours)) % number_of_looks);
}

int look_of_architecture(const std::string& arch) {
  const auto found = std::ranges::find(known, arch);
  return found == std::end(known) ? -1 : static_cast<int>(found - std::begin(known));
}

std::vector<int> looks_of(const std::vector<std::string>& names) {
  std::vector<int> out(names.size(), -1);
  std::vector<bool> taken(number_of_looks, false);
  const auto take = [&](size_t i, size_t look) {
    if (out[i] < 0 && !taken[look]) out[i] = static_cast<int>(look), taken[look] = true;
  };
  for (size_t i = 0; i < names.size(); ++i)  // the plain names first
    if (const int look = look_of_architecture(names[i]); look >= 0) take(i, static_cast<size_t>(look));
  for (size_t i = 0; i < names.size(); ++i)
    if (const int look = look_of_architecture(architecture_of(names[i])); look >= 0)
      for (size_t dash = 0; dash < std::size(dashes); ++dash)
        take(i, static_cast<size_t>(same_colour(look, static_cast<int>(dash))));
  for (size_t i = 0; i < names.size(); ++i) {
    for (size_t look = 0; look < number_of_looks; ++look) take(i, look);
    if (out[i] < 0) out[i] = static_cast<int>(i % number_of_looks);
  }
  return out;
}

}  // namespace crossply
