// Where tokens leave a model with an exit gate, and what each exit says of them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "eval/inside/probe.h"
#include "eval/inside/windows.h"

namespace crossply {

// One exit, over the positions that are scored.
struct ExitReading {
  double weight = 0;     // the mean of p_t, with which training counts it
  double likeliest = 0;  // the share of positions at which no other exit has a larger one
  double loss = 0;       // of what it says of the next token
};

constexpr int64_t exit_parts = 16;  // of a window, alike in length

struct ExitStudy {
  int64_t scored = 0;
  std::vector<ExitReading> exits = {};
  double passes = 0;                 // the mean over positions of sum_t p_t (t + 1)
  std::vector<double> by_part = {};  // the same of each part of a window; NaN where nothing is scored
  // Where each token leaves at the first exit up to which the weights add up to a half:
  double early_passes = 0, early_loss = 0;
};

// Of the model under the probe, which has an exit gate. told(done, all): after every window. Throws Exit::not_finite
// where a loss is none, Exit::usage where nothing is scored.
ExitStudy study_exits(Probe& probe, int64_t exits, const std::string& model, const std::vector<TokenWindow>& windows,
                      const std::function<void(int64_t done, int64_t all)>& told);

}  // namespace crossply
