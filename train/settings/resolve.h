// From what the user says, and what files say, to what a run will do. Nothing here opens a file but to look at its
// size, prints, or asks a device.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "data/source.h"
#include "train/settings/train_plan.h"

namespace crossply {

// What a run starts from: --init's directory, and once a run has a checkpoint, its newest.
struct InitialModel {
  Config config;
  Tokenizer tokenizer;
  std::map<std::string, std::string> files = {};  // that saved models carry along, by name
  bool goes_on = false;                           // the run's own: flags.json has its configuration
};

// What the training data says; all 0 of a plan without data.
struct DataFacts {
  DataOptions opened = {};  // as it was opened: of a directory, the globs of its files
  int64_t vocab = 0;        // 0: the files do not say
  int64_t seq_len = 0, sequences = 0;
  DocumentMark documents = {};
  std::map<std::string, std::string> token_ids = {};  // for config.json
};

// The model's configuration as far as no data is needed for it. Refuses sizes beside --init that its model has already.
// Adds lines on what it decided to notes.
Config resolve_model(const Settings& settings, const InitialModel* initial, std::string& notes);
// Tokens per sequence of the data: --seq, or usual_seq_len() for files; 0: a generated task's longest sample.
int64_t resolve_seq_len(const Settings& settings, const Config& model, const Tokenizer& tokenizer);
// model: from resolve_model. Throws Exit::usage and Exit::bad_data for what does not fit together.
TrainPlan resolve(const Settings& settings, Config model, const InitialModel* initial, const DataFacts& data,
                  const std::optional<Config>& teacher, std::string& notes);

// What plan.optimizer says of Muon: its matrices' learning rate, where it is still 0, and whether rows are normalised.
// With the rms scale an update has the size of one of AdamW's, but AdamW's own rate was measured to be too small.
void choose_muon(TrainPlan& plan);

// About how many tokens the files of --data have, by their sizes; nothing is read.
int64_t tokens_about(const DataOptions& data);
// The default of --seq for files, from their number of tokens: shorter where there is less data, so that there are
// enough steps. No other place has a default.
int64_t usual_seq_len(int64_t tokens);
// The default learning rate on files, from the model's number of parameters.
double usual_lr_of(int64_t parameters);
// The default number of steps on files: two epochs, but at most 20 tokens for each parameter.
int64_t usual_steps_of(int64_t sequences, int64_t seq_len, int64_t batch, int64_t parameters);

}  // namespace crossply
