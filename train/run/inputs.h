// What a run starts from: its data, and with --init a model.
#pragma once

#include "train/settings/options.h"

namespace crossply {

// Opens --data, reads --init, and completes the options with what only these, and the preset for the architecture, can
// say. Refuses what does not fit. A dry run whose sizes are known needs no data.
//
// --init: for a new run the sizes are the model's, but for --layers, and a plain LLaMA may start another architecture.
// A run that was started has its configuration in flags.json and the rest of o.initial in its newest checkpoint, so
// that the directory is no longer needed.
Dataset open_inputs(TrainOptions& o);

// "data: 1,003,776 training tokens in 3,921 sequences of 256; 40 steps x 32 sequences = 0.3 epochs; test set 436
// sequences"
std::string describe_data(const TrainOptions& o, const Dataset& data);
// A note where validation files are among the training files; "" otherwise. A copy under another name is known after
// Source::digest().
std::string validation_note(const Dataset& data);
// One line where files are read more often than four times; "" otherwise.
std::string epochs_warning(const TrainOptions& o, const Dataset& data);
// Tells the files of --data and --val-data from others; "" of data that is generated.
std::string digest_of_files(const TrainOptions& o, const Dataset& data);
// The files of a model directory that are not ours to understand: they belong to the model wherever it goes.
std::map<std::string, std::string> read_carried_files(const std::string& dir);
// Where most of the vocabulary is of no use; "" otherwise. That of --init is the model's own.
std::string vocabulary_note(const TrainOptions& o, const Dataset& dataset);

}  // namespace crossply
