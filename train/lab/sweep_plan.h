// The plan of a sweep: a file of tables, each a comparison by the flags of compare, of one size and one number of
// steps.
//
//   # What all tables have: flags of compare without their dashes, until the first table.
//   data = runs/text/tokens
//   optimizer = muon
//   muon-lr = 0.01, 0.02, 0.04
//   hold-decay
//
//   [connections]
//   arch = llama, lime, lime@frozen
//          llama@again
//   layers = 12
//   backbone-seeds = 1, 2, 3, 4, 5, 6, 7, 8
//   budgets = 0.5, 0.7, 1.4, 2
//
//   [depth]
//   layers = 4, 8, 16
//
// An indented line goes on with the one above. A switch stands alone. In lists spaces mean nothing. Several layers, or
// several width (with as many heads and ffn, or one for all), are a table each: depth-L4, depth-L8, depth-L16. budgets:
// of the first architecture alone, so many times the steps, each a table: connections-x0.5.
#pragma once

#include <string>
#include <vector>

namespace crossply {

struct PlannedTable {
  std::string name;                // of its directory
  std::vector<std::string> flags;  // of compare: "--arch", "llama,lime", "--hold-decay"
  std::string of = {};             // the table that this is a budget of; "": none
  double budget = 1;               // times that one's steps
  std::string where = {};          // file and line of its name, for errors

  std::string flag(const std::string& name) const;  // its value; "": there is none
  // Sets a flag of one value.
  void set(const std::string& name, const std::string& value);
};

struct SweepPlan {
  std::string text;  // without comments and empty lines, by which two plans are the same
  std::vector<PlannedTable> tables;
};

// Throws Exit::bad_data, with path and line, for what is none; whether a flag is one of compare's is not known here.
SweepPlan parse_sweep_plan(const std::string& text, const std::string& path);
// Throws Exit::no_input, too.
SweepPlan read_sweep_plan(const std::string& path);

}  // namespace crossply
