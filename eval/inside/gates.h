// The gates through which blocks take in values of another block: how far they are open, and what they are worth. A
// gated block is one whose gates a Probe knows by name: gate.n, (1, T, K), one for each token and key/value head.
#pragma once

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "eval/inside/probe.h"
#include "eval/inside/windows.h"

namespace crossply {

// The gates of one block over tokens.
class GateMoments {
 public:
  // gates (T, heads), of which the first `tokens` count.
  void add(const std::vector<double>& gates, int64_t heads, int64_t tokens);
  size_t heads() const { return sums_.size(); }
  int64_t tokens() const { return tokens_; }
  double head_mean(size_t j) const { return sums_[j] / static_cast<double>(tokens_); }
  double mean() const;  // over heads and tokens
  double head_zeros(size_t j) const { return static_cast<double>(zeros_[j]) / static_cast<double>(tokens_); }
  double zeros() const;  // the share that is 0 exactly
  // Population standard deviation of the heads' means over the magnitude of their mean; NaN where that is 0.
  double head_variation() const;

 private:
  std::vector<double> sums_;    // (heads)
  std::vector<int64_t> zeros_;  // (heads)
  int64_t tokens_ = 0;
};

// The mean loss with gates set to something, and the standard error over windows of how far it is from the loss with
// all gates as they are; NaN of one window.
struct GateIntervention {
  double loss = 0, error = NAN;
};
struct GatedBlock {
  int layer;
  GateMoments means = {}, gates = {};  // over the windows that the constants come from, and over the others
  // Over the others, with this block's gates set to 0, to their mean, to every head's mean.
  GateIntervention zero = {}, mean = {}, heads = {};
};
inline constexpr GateIntervention GatedBlock::*gate_interventions[] = {&GatedBlock::zero, &GatedBlock::mean,
                                                                       &GatedBlock::heads};

// The standard error of sum(changed - plain) / sum(scored), the sums being of windows, as that of a ratio: of
// changed - plain - ratio scored. NaN of one window.
double paired_error(const std::vector<double>& changed, const std::vector<double>& plain,
                    const std::vector<double>& scored);

struct GateStudy {
  int64_t scored = 0;
  double loss = 0;  // with all gates as they are
  std::vector<GatedBlock> blocks = {};

  // exp(changed) - exp(loss): how much higher the perplexity is.
  double change(double changed) const;
  // Of that difference, of an error of the loss's, to first order: exp(changed) error.
  static double change_error(double changed, double error) { return std::exp(changed) * error; }
};

// The layers of a model that have gates.
std::vector<int> gated_layers(const Probe& probe);
// Of the model under the probe. The first `calibration` windows are for the constants; the others, one at least, are
// looked at and scored, with one block changed at a time. told(done, all): after every forward. Throws
// Exit::not_finite where a loss is none, Exit::usage where nothing is scored.
GateStudy study_gates(Probe& probe, const std::string& model, const std::vector<TokenWindow>& windows,
                      size_t calibration, const std::function<void(int64_t done, int64_t all)>& told);

}  // namespace crossply
