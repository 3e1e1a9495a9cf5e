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
  const bool task = source.task() != nullptr;
  const int64_t places = task ? source.size() : source.offsets(T);
  Random random(seed, stream_of("windows"));
  std::vector<int32_t> tokens(static_cast<size_t>(task ? S : T)), targets(tokens.size());
  std::vector<TokenWindow> windows;
  for (int64_t i = 0; i < N; ++i) {
    const int64_t place = random.below(places);
    if (task) source.read(place, tokens.data(), targets.data());
    else source.read_at(place, T, tokens.data(), targets.data());
    const auto last = std::find_if(targets.rbegin(), targets.rend(), [](int32_t target) { return target >= 0; });
    windows.push_back({{tokens.begin(), tokens.begin() + T}, std::min<int64_t>(T, targets.rend() - last)});
  }
  return windows;
}

void prepare_analysis_out(const std::string& dir, const std::string& name) {
  if (path_exists(dir) && !std::filesystem::is_directory(dir))
    fail(Exit::usage, "--out ", dir, " is no directory; choose another name");
  std::error_code failed;
  std::filesystem::create_directories(dir, failed);
  if (failed) fail_io("create", dir, failed.value());
  const std::string base = dir + "/" + name;
  const std::string types[] = {".json", ".csv", ".svg"};
  for (const std::string& type : types)
    if (path_exists(base + type) && !std::filesystem::is_regular_file(base + type, failed))
      fail(Exit::usage, "--out: ", base, type, " is no file; move it away or choose another directory");
  bool ours = false;
  try {
    ours = path_exists(base + ".json") && read_json(base + ".json").value("crossply", nlohmann::json()) == "analyze";
  } catch (const Error& error) {
    if (error.code != Exit::bad_data) throw;
  }
  for (const std::string& type : types)
    if (path_exists(base + type) && !ours)
      fail(Exit::usage, "--out: ", base, type,
           " exists and was not written by this program; move it away or choose another directory");
}

}  // namespace crossply
