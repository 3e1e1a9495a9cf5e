// What a run starts from: its data, and with --init a model.
#pragma once

#include "train/settings/resolve.h"

namespace crossply {

struct Inputs {
  TrainPlan plan;
  Dataset data;  // nothing in it where a plan of known sizes needs none
};
// Opens --data, reads --init and --teacher, and resolves the settings with what they say. Refuses what does not fit.
Inputs open_inputs(const Settings& settings);

// "data: 1,003,776 training tokens in 3,921 sequences of 256; 40 steps x 32 sequences = 0.3 epochs; test set 436
// sequences"
std::string describe_data(const TrainPlan& plan, const Dataset& data);
// A note where validation files are among the training files; "" otherwise. A copy under another name is known after
// Source::digest().
std::string validation_note(const Dataset& data);
// One line where files are read more often than four times; "" otherwise.
std::string epochs_warning(const TrainPlan& plan, const Dataset& data);
// Tells the files of --data and --val-data from others; "" of data that is generated.
std::string digest_of_files(const TrainPlan& plan, const Dataset& data);
// The files of a model directory that are not ours to understand: they belong to the model wherever it goes.
std::map<std::string, std::string> read_carried_files(const std::string& dir);
// Where most of the vocabulary is of no use; "" otherwise. That of --init is the model's own.
std::string vocabulary_note(const TrainPlan& plan, const Dataset& dataset);

}  // namespace crossply
