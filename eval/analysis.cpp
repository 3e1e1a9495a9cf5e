#include "eval/analysis.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "engine/file.h"
#include "engine/rng.h"
#include "models/json_file.h"

namespace crossply {

std::vector<TokenWindow> random_windows(const Source& source, int64_t T, int64_t N, uint64_t seed) {
  const int64_t S = source.seq_len();
  CHECK_THAT(T >= 1 && T <= S, "windows of ", T, " tokens from sequences of ", S);
  Random random(seed, stream_of("windows"));
  std::vector<int32_t> tokens(static_cast<size_t>(S)), targets(tokens.size());
  std::vector<TokenWindow> windows;
  for (int64_t i = 0; i < N; ++i) {
    source.read(random.below(source.size()), tokens.data(), targets.data());
    const auto last = std::find_if(targets.rbegin(), targets.rend(), [](int32_t target) { return target >= 0; });
    const int64_t real = targets.rend() - last, slack = source.task() != nullptr ? 0 : std::max<int64_t>(0, real - T);
    const int64_t start = random.below(slack + 1);
    windows.push_back({{tokens.begin() + start, tokens.begin() + start + T}, std::min(T, real)});
  }
  return windows;
}

void check_analysis_out(const std::string& dir, const std::string& name) {
  if (path_exists(dir) && !std::filesystem::is_directory(dir))
    fail(Exit::usage, "--out ", dir, " is no directory; choose another name");
  const std::string base = dir + "/" + name;
  bool ours = false;
  try {
    ours = path_exists(base + ".json") && read_json(base + ".json").value("crossply", nlohmann::json()) == "analyze";
  } catch (const Error& error) {
    if (error.code != Exit::bad_data) throw;
  }
  for (const char* type : {".json", ".csv", ".svg"})
    if (path_exists(base + type) && !ours)
      fail(Exit::usage, "--out: ", base, type,
           " exists and was not written by this program; move it away or choose another directory");
}

}  // namespace crossply
