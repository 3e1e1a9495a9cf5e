#include "train/run/environment.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/version.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "train/run/accounting.h"

namespace crossply {
namespace {

using nlohmann::json;

// "2026-01-31T23:59:59Z"
std::string time_in_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

// "AMD EPYC, family 26, model 2": names alone are those of several generations.
std::string cpu_model() {
  std::ifstream in("/proc/cpuinfo");
  std::map<std::string, std::string> first;
  for (std::string line; std::getline(in, line) && !line.empty();) {
    const size_t colon = line.find(':');
    const std::string key = line.substr(0, line.find_last_not_of(" \t", colon == line.npos ? colon : colon - 1) + 1);
    first[key] = colon == line.npos ? "" : line.substr(std::min(line.size(), colon + 2));
  }
  if (!first.contains("model name")) return "unknown";
  std::string name = first["model name"];
  if (first.contains("cpu family")) name += ", family " + first["cpu family"] + ", model " + first["model"];
  return utf8_or_escaped(name);
}

// What the compiler was allowed to use, as it says itself: this decides the last digits.
json instruction_sets() {
  json sets = json::array();
#ifdef __AVX2__
  sets.push_back("avx2");
#endif
#ifdef __FMA__
  sets.push_back("fma");
#endif
#ifdef __AVX512F__
  sets.push_back("avx512f");
#endif
#ifdef __AVX512BF16__
  sets.push_back("avx512bf16");
#endif
#ifdef __AMX_BF16__
  sets.push_back("amx-bf16");
#endif
#ifdef __ARM_NEON
  sets.push_back("neon");
#endif
  return sets;
}

json this_build() {
#ifdef __clang__
  const std::string compiler = __VERSION__;
#else
  const std::string compiler = "g++ " __VERSION__;
#endif
  json all = {{"commit", commit()}, {"compiler", compiler}, {"instruction_sets", instruction_sets()}};
#ifdef __SANITIZE_ADDRESS__
  all["sanitizers"] = true;
#endif
  return all;
}

// The first line of a file of the system's; null where there is none.
json first_line(const char* path) {
  std::ifstream in(path);
  std::string line;
  return std::getline(in, line) ? json(utf8_or_escaped(line)) : json();
}

json this_machine() {
  utsname system{};
  ::uname(&system);
  const auto memory = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  return {{"cpu", cpu_model()},
          {"cores", std::thread::hardware_concurrency()},
          {"memory_bytes", static_cast<int64_t>(memory)},
          {"system", str(system.sysname, " ", system.release, " ", system.machine)}};
}

// The objects of a file that a run may have left in any state; none of one that is not there.
std::vector<json> lines_of(const std::string& path) {
  std::vector<json> lines;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return lines;
  std::ifstream in(path);
  for (std::string text; std::getline(in, text);)
    if (json line = try_parse_json(text); line.is_object()) lines.push_back(std::move(line));
  return lines;
}

}  // namespace

std::string origin_of(const json& environment) {
  const auto text = [&](const char* part, const char* key) {
    const std::string found = text_at(environment.is_object() ? environment.value(part, json()) : json(), key);
    return found.empty() ? "unknown" : found;
  };
  return text("machine", "cpu") + ", commit " + text("build", "commit");
}

std::string this_origin() { return cpu_model() + ", commit " + commit(); }

std::vector<std::string> command_line() {
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(in, word, '\0');) words.push_back(utf8_or_escaped(word));
  return words;
}

void record_environment(const std::string& path, const TrainPlan& plan, const Trainer& trainer, const Dataset& data) {
  ProcessGroup& group = trainer.group();
  const double peak = peak_flops(plan, trainer.device(), group.world.size);
  json line = {{"time", time_in_utc()},
               {"steps_done", trainer.steps_done()},
               {"tokens_done", trainer.steps_done() * trainer.tokens_per_step()},
               {"scored_tokens_done", trainer.scored_tokens < 0 ? json() : json(trainer.scored_tokens)},
               {"epochs_done", trainer.epochs()},
               {"command", plan.command.empty() ? command_line() : plan.command},
               {"build", this_build()},
               {"machine", this_machine()},
               {"device", trainer.device().describe()},
               {"device_versions", trainer.device().arithmetic().versions},
               {"gpu_driver", first_line("/proc/driver/nvidia/version")},
               {"ranks", group.world.size},
               {"ranks_of_this_machine", group.world.local_size},
               {"ranks_by", group.world.alone() ? json() : json(group.comm().describe())},
               {"peak_flops_per_second", peak > 0 ? json(peak) : json()},
               {"validation_files", data.test->files().size()},
               {"validation_files_trained_on", data.test->files_of_both().size()}};
  line.update(to_json(account(plan, trainer.params(), trainer.flops_per_token())));
  std::string before = path_exists(path) ? read_file(path, std::numeric_limits<int64_t>::max()) : "";
  if (!before.empty() && before.back() != '\n') before += '\n';
  write_file_atomically(path, before + json_text(line) + "\n");
}

json recorded_environment(const std::string& path) {
  json last;
  for (const json& line : lines_of(path)) {
    if (!line.contains("build") || !line.contains("machine") || !line.contains("device")) continue;
    last = {{"build", line["build"]}, {"machine", line["machine"]}, {"device", line["device"]}};
  }
  return last;
}

double recorded_flops_per_token(const std::string& path) {
  double flops = NAN;
  for (const json& line : lines_of(path))
    if (line.contains("flops_per_token") && holds<double>(line["flops_per_token"], 0)) flops = line["flops_per_token"];
  return flops;
}

ValidationFiles recorded_validation_files(const std::string& path) {
  ValidationFiles files;
  for (const json& line : lines_of(path)) {
    const json all = line.value("validation_files", json()), both = line.value("validation_files_trained_on", json());
    if (holds<int64_t>(all, 0) && holds<int64_t>(both, 0)) files = {all, both};
  }
  return files;
}

}  // namespace crossply
