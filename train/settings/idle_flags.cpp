#include "train/settings/idle_flags.h"

#include <algorithm>
#include <cstdio>

#include "cli/needs.h"
#include "cli/program.h"
#include "models/registry.h"

namespace crossply {

std::string flag_of(std::string key) {
  std::ranges::replace(key, '_', '-');
  return "--" + key;
}

std::string check_options(const Settings& settings) {
  for (const IdleOption& idle : idle_options(settings.config)) {
    const std::string flag = option_flag(settings.config.arch, idle.key), &value = settings.config.options.at(idle.key);
    const std::string wanted = wanted_values(idle.need);
    if (settings.given.contains(flag))
      fail(Exit::usage, flag, idle.need.only_for.empty() ? "" : " " + value, " has no effect without ",
           flag_of(idle.need.key), wanted.empty() ? "" : " ", wanted, "; add that, or leave it out");
  }
  if (!settings.init.empty()) return "";  // its config.json was read, and said so
  return note_idle_options(settings.config,
                           settings.resume ? settings.out + "/flags.json" : "--preset " + settings.preset);
}

std::string notes_on_train_flags(CLI::App& app, const Config& config) {
  CommandLine usual("", "");
  Settings settings;
  settings.config.arch = config.arch;
  if (config.gpt2()) use_gpt2(settings.config);
  add_train_flags(usual, settings);
  return notes_on_needs(app, usual);
}

void refuse_idle_options(const ArchChoice& choice, const Config& config) {
  for (const IdleOption& idle : idle_options(config)) {
    if (!choice.options.contains(idle.key)) continue;
    const std::string value = idle.need.only_for.empty() ? "" : "=" + idle.need.only_for;
    const std::string wanted = wanted_values(idle.need);
    fail(Exit::usage, "--arch ", choice.text, ": ", idle.key, value, " has no effect without ", idle.need.key,
         wanted.empty() ? "" : "=", wanted, "; add that, or leave it out");
  }
}

// No refusal: the launcher says how many processes there are, and the same command may have several elsewhere.
void note_single_process(const Settings& settings) {
  if (settings.world.ranks > 0) return;
  for (const char* flag : flags_of_ranks)
    if (settings.given.contains(flag))
      std::fprintf(stderr, "note: %s has no effect in a single process; mpirun, torchrun or srun starts several\n",
                   flag);
}

}  // namespace crossply
