// analyze --dump: what a model computes on its way, for other tools.
#pragma once

#include <string>
#include <vector>

#include "eval/inside/analysis.h"

namespace crossply {

// The values that these patterns name, where * stands for any part: "hidden.*", "attention.3". Throws Exit::usage for a
// pattern that names none, with the names that there are.
std::vector<std::string> matching_names(const std::vector<std::string>& patterns, const std::vector<std::string>& names,
                                        const std::string& model);

// Throws Exit::usage where there is something at `path` that no dump of this program has put there.
void check_dump_path(const std::string& path);

// Writes to `path`, as safetensors, what the model makes of N windows of T tokens: every value with (N, T) in front in
// place of (1, T), attention.i, the probabilities (N, H, T, T), and tokens, targets (N, T) and lengths (N) as I64. What
// has no tokens, as routes that are the same for all, is there once. Says its size before it starts, and throws
// Exit::usage where it has no room in memory. Returns a line for the terminal.
std::string dump_values(Subject& subject, const std::vector<std::string>& patterns, const AnalysisOptions& o,
                        const std::string& path);

}  // namespace crossply
