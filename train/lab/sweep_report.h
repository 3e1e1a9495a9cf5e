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
// A table that is no budget of another, with what is found of it: resampling and simulation take a second or two.
struct ReportTable {
  const SweepTable* table;
  std::vector<Budget> budgets;
  std::vector<ReportRow> rows;  // the lowest loss first
  std::string families;         // what could be found, in sentences
};
std::vector<ReportTable> report_of(const std::vector<SweepTable>& tables);

// For a terminal of 80 columns.
std::string sweep_summary(const std::vector<ReportTable>& report);
// Where one arm of a table stands, in words; "" where nothing is known of it.
std::string place_of(const ReportTable& of, const std::string& arch);
// Writes report.md, results.csv, results.json and TABLE.svg in a directory. notes: lines about machines, in front.
// Throws Exit::io.
void write_sweep_report(const std::vector<ReportTable>& report, const std::string& out, const std::string& notes);

}  // namespace crossply
