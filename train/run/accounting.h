// What a run costs, by the definitions that published numbers are made of: docs/training.md#what-a-run-costs.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "engine/device.h"
#include "engine/params.h"
#include "train/settings/train_plan.h"

namespace crossply {

struct Accounting {
  int64_t parameters = 0;  // all
  // Those that each token is multiplied with: projections, routers that read the width, the head (a tied one once).
  int64_t matrix = 0;
  // Without tables of tokens, positions and values. A tied head is one of them.
  int64_t non_embedding = 0;
  int64_t applied = 0;                             // the same, with those of a loop's core counted in every pass
  int64_t muon_matrices = 0, muon_parameters = 0;  // that Muon updates
  double flops_per_token = 0;                      // forward and backward, of the tape
  double attention_of_palm = 0;  // FLOPs a token of attention without a causal mask, 12 L H D T; L: runs of blocks
  double newton_schulz = 0;      // FLOPs of a step

  // FLOPs a token by two formulas of publications (Kaplan et al., arXiv 2001.08361; PaLM, arXiv 2204.02311).
  double six_n() const { return 6 * static_cast<double>(applied); }
  double palm() const { return six_n() + attention_of_palm; }
};

// flops_per_token: as the tape says.
Accounting account(const TrainPlan& plan, const ParameterTable& params, double flops_per_token);
// FLOP/s of so many such devices at the products of this run, by their data sheets; 0: not known, as of CPUs.
double peak_flops(const TrainPlan& plan, const Device& device, int ranks);
// All of it under the names of results.json and environment.jsonl.
nlohmann::json to_json(const Accounting& accounting);
// Lines of a dry run: parameters, FLOPs a token and of the run by each definition.
std::string describe(const Accounting& accounting, double tokens);
// Lines, with Muon only: how many rows and parameters are its matrices, its learning rate, and what Newton-Schulz
// costs, with a warning if that is more than a fifth of a step of so many tokens.
std::vector<std::string> describe_optimizer(const TrainPlan& plan, const Accounting& accounting, double tokens);

}  // namespace crossply
