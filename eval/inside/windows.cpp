#include "eval/inside/windows.h"

#include <algorithm>

#include "cli/format.h"
#include "cli/standard_streams.h"
#include "engine/rng.h"

namespace crossply {

WindowLengths::WindowLengths(const std::vector<TokenWindow>& list) : windows(std::ssize(list)) {
  shortest = list.empty() ? 0 : list[0].length;
  for (const TokenWindow& window : list) {
    shortest = std::min(shortest, window.length), longest = std::max(longest, window.length);
    tokens += window.length;
  }
}

std::string WindowLengths::text() const {
  return str(format_count(windows), windows == 1 ? " window of " : " windows of ",
             shortest == longest ? "" : str(shortest, " to "), longest, longest == 1 ? " token" : " tokens");
}

int64_t scored_length(const std::vector<int32_t>& targets) {
  return targets.rend() - std::find_if(targets.rbegin(), targets.rend(), [](int32_t target) { return target >= 0; });
}

std::vector<TokenWindow> random_windows(const Source& source, int64_t T, int64_t N, uint64_t seed) {
  const int64_t S = source.seq_len();
  CHECK_THAT(T >= 1 && T <= S, "windows of ", T, " tokens from sequences of ", S);
  const bool task = source.task() != nullptr;
  const int64_t places = task ? source.size() : source.offsets(T);
  Random random(seed, stream_of("windows"));
  std::vector<int32_t> tokens(static_cast<size_t>(task ? S : T)), targets(tokens.size());
  std::vector<TokenWindow> windows;
  for (int64_t i = 0; i < N; ++i) {
    const int64_t place = random.below(places);
    if (task) source.read(place, tokens.data(), targets.data());
    else source.read_at(place, T, tokens.data(), targets.data());
    windows.push_back({{tokens.begin(), tokens.begin() + T},
                       {targets.begin(), targets.begin() + T},
                       std::min(T, scored_length(targets)),
                       place});
  }
  return windows;
}

int64_t window_length(int64_t asked, int64_t usual, const std::string& model, const Config& config,
                      const std::string& data, const Source& source) {
  const int64_t of_model = config.max_position_embeddings, of_data = source.seq_len();
  const int64_t most = std::min(of_model, of_data);
  if (asked > of_model)
    fail(Exit::usage, "--length ", asked, ": ", model, " takes sequences of at most ", of_model, " tokens");
  if (asked > of_data)
    fail(Exit::usage, "--length ", asked, ": the sequences of ", data, " have only ", of_data, " tokens here");
  if (asked == 1) fail(Exit::usage, "--length 1: ", model, " needs windows of two tokens or more");
  if (most < 2)
    fail(Exit::bad_data, of_model < 2 ? model : data, " has sequences of ", most,
         " tokens, and an analysis needs windows of two or more; give other data");
  if (asked == 0 && most < usual)
    say_note(str("windows of ", most, " tokens, not of ", usual, ": ",
                 of_model <= of_data ? "the model takes" : "the data's sequences have", " no more"));
  return asked > 0 ? asked : std::min(usual, most);
}

int64_t scored_positions(const std::string& model, std::span<const TokenWindow> windows) {
  int64_t scored = 0;
  for (const TokenWindow& window : windows)
    scored += std::count_if(window.targets.begin(), window.targets.end(), [](int32_t target) { return target >= 0; });
  if (scored == 0)
    fail(Exit::usage, model, ": no position of these windows is scored; give more --sequences or a larger --length");
  return scored;
}

}  // namespace crossply
