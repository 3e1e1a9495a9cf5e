// Which data a model is looked at with: what flags leave open is as in the run that trained it, and the split is the
// one that it was not trained on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "data/source.h"
#include "eval/loaded_model.h"

namespace crossply {

struct DataChoice {
  DataOptions data, run;         // run: of the run that trained the model; all empty without one
  std::string split;             // test, train or all
  bool files = false;            // not generated
  bool own = false;              // is it the data of the run?
  bool own_parts = false;        // is it also cut into the same training and test set?
  bool guessed_seq_len = false;  // the model's positions, at most max_guessed_seq_len

  const std::string& scored() const { return split == "test" && !data.val_spec.empty() ? data.val_spec : data.spec; }
};

constexpr int64_t max_guessed_seq_len = 2048;

// The line "split test: FILE, kept from training", safe for a terminal. complete: is it all of its split?
std::string describe_split(const DataChoice& choice, bool complete);

struct ModelData {
  DataChoice choice;
  Dataset dataset;
  Tokenizer tokenizer;  // what its ids mean: the model's, or the data's where the model has none

  const Source& source() const { return choice.split == "train" ? *dataset.train : *dataset.test; }
};
// The bytes of text that the targets of a source's first so many sequences stand for; of a tokenizer of bytes or bpe.
// Tokens that begin or end a text stand for none.
int64_t scored_bytes(const Source& source, int64_t sequences, const Tokenizer& tokenizer);

// asked: of the flags, zero and empty where they say nothing, as `split` and `seed` of generated data are. name: of the
// model, for messages. Says on stderr where the model may know the data from its training. Throws Exit::usage for a
// split that there is not, bad_data where data and model do not go together, and what open_dataset throws.
ModelData open_data(const DataOptions& asked, const std::string& split, const std::optional<uint64_t>& seed,
                    const LoadedModel& model, const std::string& name);

}  // namespace crossply
