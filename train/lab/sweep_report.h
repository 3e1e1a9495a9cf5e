// What a sweep has found: a page, figures, CSV and JSON, and a few lines for a terminal.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "eval/interactions.h"
#include "train/lab/sweep_tables.h"

namespace crossply {

// An arm beside the others of its table. Ratios are to the first architecture.
struct ReportRow {
  Arm arm;
  TrainResult planned;              // parameters, FLOPs and bytes a token, memory
  std::vector<double> losses = {};  // of the seeds that ended well
  double loss = NAN, sd = NAN;      // their mean and standard deviation
  int64_t seeds = 0;                // that are needed; of an arm whose spread is unlike the others' three more
  int64_t done = 0, lost = 0;       // of these ended, and of those diverged
  int64_t tried = 0;                // learning rates
  std::string backbone = {};        // the first architecture with this optimizer, to which costs relate
  bool judged = false;              // it is compared with that one: it is neither that nor a control
  Verdict verdict = {};
  Worth worth = {};  // in the backbone's steps; of the backbone itself once them, of an arm that lost a seed nothing
  StepTime time = {};
  double further = NAN;  // the mean of further seeds that are not among these
  double pairs = NAN;    // share of minimal pairs
};
// Of all arms that are compared with one.
struct ReportFamily {
  std::string backbone;
  FamilyVerdict verdict;
  double detectable = NAN;  // NaN: nothing can be tested
};
// An arm against the same with frozen routers.
struct ReportControl {
  std::string name, control;
  Verdict verdict;
  std::string words;
};
// A combination of connections beside its parts.
struct CombinedArm {
  std::string name;
  Interaction interaction;
};
// A table that is no budget of another, with what is found of it: resampling and simulation take a second or two.
struct ReportTable {
  const SweepTable* table;
  std::map<std::string, std::vector<Budget>> budgets;  // by optimizer
  std::vector<ReportRow> rows;                         // the lowest loss first; arms that lost a seed last
  std::vector<ReportFamily> families;
  std::vector<ReportControl> controls;
  std::vector<CombinedArm> combined;
};
std::vector<ReportTable> report_of(const std::vector<SweepTable>& tables);

// An arm's costs over its backbone's; NaN: not known.
struct Costs {
  double flops, bytes, seconds, memory;
};
const ReportRow& backbone_of(const std::vector<ReportRow>& rows, const ReportRow& row);
Costs costs_of(const std::vector<ReportRow>& rows, const ReportRow& row);

// For a terminal of 80 columns.
std::string sweep_summary(const std::vector<ReportTable>& report);
// Where one arm of a table stands, in words; "" where nothing is known of it.
std::string place_of(const ReportTable& of, const std::string& arch);
// Where the cells were trained, and what the comparison of machines said (machines.h).
struct ReportOrigins {
  std::map<std::string, int64_t> cells;  // by CPU and commit
  std::string notes;                     // lines of Markdown
};
// results.json and results.csv. about: what the numbers are.
std::string sweep_json(const std::vector<ReportTable>& report, const ReportOrigins& origins, const std::string& about);
std::string sweep_csv(const std::vector<ReportTable>& report);
// Writes report.md, results.csv, results.json and TABLE.svg in a directory. Throws Exit::io.
void write_sweep_report(const std::vector<ReportTable>& report, const std::string& out, const ReportOrigins& origins);

}  // namespace crossply
