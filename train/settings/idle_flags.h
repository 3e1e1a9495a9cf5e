// Flags and options of a run that have no effect beside the others: refused where they were typed, a note where a
// preset, a file or an earlier run set them. What each needs stands beside its definition.
#pragma once

#include <string>

#include "train/settings/arch_list.h"
#include "train/settings/settings.h"

namespace crossply {

// "--value-embeds" of "value_embeds".
std::string flag_of(std::string key);
// For the options of a complete configuration. Throws Exit::usage for a given one without effect; returns a line of
// notes for one of a preset or a resumed run.
std::string check_options(const Settings& settings);
// The same for a choice of --arch: throws for an option that it names. config: of its model, complete.
void refuse_idle_options(const ArchChoice& choice, const Config& config);
// Lines about trainers' flags that a preset or a resumed run set, and that have no effect beside those of `app`.
// config: the architecture and the backbone.
std::string notes_on_train_flags(CLI::App& app, const Config& config);
// Flags that have an effect only where several processes train.
inline const char* const flags_of_ranks[] = {"--peer-timeout", "--check-replicas", "--log-ranks"};
// A note on stderr about those of them that are given. Call it where there is one process.
void note_single_process(const Settings& settings);

}  // namespace crossply
