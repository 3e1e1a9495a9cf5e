// What analyze --what sae has found in one model, and how it is told.
#pragma once

#include <string>
#include <vector>

#include "eval/inside/analysis.h"
#include "eval/inside/features.h"

namespace crossply {

// How well the vectors of a set are put together again.
struct Reconstruction {
  int64_t tokens = 0;
  double loss = 0;  // mean |v - v_hat|^2
  double fve = 0;   // 1 - sum |v - v_hat|^2 / sum |v - the set's mean|^2
};

struct LabelledGates {
  int layer;
  std::vector<double> by_category;  // G of feature_categories(); NaN where no token has such a feature
  double all;                       // the mean over all tokens
};

struct SaeFinding : AnalysedModel {
  std::string split = "";
  int64_t windows = 0, held_out_windows = 0, longest = 0;
  std::vector<int64_t> train_windows = {};  // of those that were drawn, which share no token with one held out
  AutoencoderSizes sizes{};
  int64_t steps = 0, buffer = 0;    // buffer: vectors trained on that were in memory at once
  double lr = 0, scale = 0;         // v is the flattened value times scale
  double start_variance = 0;        // of the vectors trained on, by token, after scaling
  std::vector<double> losses = {};  // of every step
  Reconstruction train = {}, held_out = {};
  int64_t live = 0;
  double active = 0;                      // features on a token, mean
  std::vector<int64_t> activations = {};  // of each feature
  FeatureRules rules = {};
  FeatureSelection selection = {};
  std::vector<std::vector<std::string>> texts = {};  // of the retained features' top tokens; empty: not known
  std::string labels_file = "";                      // whose labels come before those by rules; "": none
  int64_t labels_given = 0;                          // tokens that it labels
  std::string weights = "";                          // the file, "" for none
  std::vector<LabelledGates> gates = {};             // of layers with gates

  bool labelled() const { return !texts.empty() || selection.retained.empty(); }
  int64_t label_count(const std::string& label) const;
  int64_t category_count(const std::string& category) const;
  double density() const { return active / static_cast<double>(sizes.m); }
};

// Of so many windows, the last ones.
int64_t sae_held_out_windows(int64_t windows);
// Which windows to train on: of those that are not held out, all that share no token with one of them. files: places
// are tokens; else a window is a sequence of a task.
std::vector<int64_t> sae_train_windows(const std::vector<TokenWindow>& windows, bool files);

std::string sae_table(const SaeFinding& found);
nlohmann::json sae_json(const SaeFinding& found);
std::string sae_csv(const std::vector<SaeFinding>& all);
// Curves of the training, the labels of the retained features, and gates by category where there are any. names: of the
// models, for legends.
// looks: of the models' curves.
std::string sae_svg(const std::vector<SaeFinding>& all, const std::vector<std::string>& names,
                    const std::vector<int>& looks);

}  // namespace crossply
