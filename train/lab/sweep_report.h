// What a sweep has found: a page, figures, CSV and JSON, and a few lines for a terminal.
#pragma once

#include <string>
#include <vector>

#include "train/lab/sweep_tables.h"

namespace crossply {

// An arm beside the others of its table. Ratios are to the first architecture.
struct ReportRow {
  Arm arm;
  TrainResult planned;  // parameters, FLOPs and bytes a token, memory
  double loss = NAN, sd = NAN;
  int64_t done = 0, lost = 0;  // seeds that ended, and of these that diverged
  int64_t tried = 0;           // learning rates
  std::string backbone = {};   // the first architecture with this optimizer, to which costs relate
  bool judged = false;         // it is compared with that one: it is neither that nor a control
  Verdict verdict = {};
  Worth worth = {};  // in the backbone's steps
  StepTime time = {};
  double further = NAN;  // the mean of further seeds
  double pairs = NAN;    // share of minimal pairs
};
// Those of a table, the lowest loss first; arms of which nothing is known are left out.
std::vector<ReportRow> rows_of(const std::vector<SweepTable>& tables, const SweepTable& table);

// For a terminal of 80 columns: each table that is no budget of another.
std::string sweep_summary(const std::vector<SweepTable>& tables);
// Where one arm stands, in words.
std::string place_of(const std::vector<SweepTable>& tables, const SweepTable& table, const std::string& arch);
// Writes report.md, results.csv, results.json and TABLE.svg in a directory. notes: lines about machines, in front.
// Throws Exit::io.
void write_sweep_report(const std::vector<SweepTable>& tables, const std::string& out, const std::string& notes);

}  // namespace crossply
