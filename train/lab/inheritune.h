// What train_inheritune knows of its rounds, and what it makes of that: a table, inheritune.json, .md and .svg.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "train/settings/train_plan.h"

namespace crossply {

// The flags of Inheritune's own.
struct Recipe {
  std::string reference;           // model or run directory, absolute
  int64_t start = 0;               // blocks of the first round; 0: half of the reference's
  int64_t grow = 2, rounds = 0;    // rounds 0: no limit
  std::string mode = "reinherit";  // grow_modes
  bool positions = true, final_norm = true;
  double tolerance = 0;  // nats
};
inline const std::vector<std::string> grow_modes = {"reinherit", "continue"};

// A round: a model of so many blocks, which inherits and is trained. Losses are over all of the validation set; NaN
// until they are measured.
struct Round {
  int64_t blocks = 0, parameters = 0;
  double initial_loss = NAN, final_loss = NAN;
  bool is_done() const { return std::isfinite(final_loss); }
};

struct Inheritance {
  Recipe recipe;
  TrainPlan plan;  // of a round, but with the reference's configuration, and it for --init
  int64_t reference_parameters = 0;
  double reference_loss = NAN;
  int64_t sequences = 0, tokens = 0;                    // of the validation set
  std::string reference_digest = "", data_digest = "";  // tell whether a resumed run has the same
  std::vector<Round> rounds = {};
  std::string reference_dir = "";  // the reference's model directory, as long as this process holds it

  int64_t depth() const { return plan.config.num_hidden_layers; }  // of the reference
  bool matches(const Round& round) const { return round.final_loss <= reference_loss + recipe.tolerance; }
  // The directories of round i (from 0): OUT/round_1_blocks_4 is its run, OUT/initial_1_blocks_4 what that starts from.
  std::string run_dir(size_t i) const;
  std::string initial_dir(size_t i) const;
  // The next round's blocks; 0 where there is none, however the last one ends.
  int64_t next_blocks() const;
  // How the last round ended, in a line: which one matches, or why there is no other.
  std::string verdict() const;
};

// For a terminal of 80 columns: a row for each round, and what the numbers are of.
std::string rounds_table(const Inheritance& all);
// inheritune.json in --out, which --resume needs.
void write_state(const Inheritance& all);
// Writes inheritune.json, inheritune.md and inheritune.svg in --out. Returns the text of the first Exit::io error, such
// as that of a full disk; "" if all three are written.
std::string write_rounds(const Inheritance& all);

// Of the run in a directory: its flags. False if there is none. Throws Exit::bad_data if inheritune.json is damaged.
bool take_recipe(const std::string& out, Recipe& recipe, Settings& settings);
// For a run that is resumed: takes what is known of its rounds from inheritune.json. Throws Exit::usage where that has
// other flags, but for --rounds and what a resumed trainer may change; Exit::bad_data where the data is another. False
// if there is none.
bool take_up(Inheritance& all);

}  // namespace crossply
