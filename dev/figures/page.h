// What figures makes of the records of one experiment: pictures, and results.md with every number beside them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/dots.h"
#include "dev/figures/record.h"

namespace crossply::figures {

struct LabelledArm {
  std::string label;
  RecordedArm arm;
};
// Arms that are compared with the one of them that has the baseline's name, or with one from elsewhere.
struct ComparedArms {
  std::string caption;
  RecordedArm baseline;
  std::vector<LabelledArm> arms;
};

// "0.004, muon 0.02 (edge)": at which the arm was trained, and whether it is at the edge of those that were tried.
std::string rates_of(const RecordedArm& arm);

double test_loss_of(const RecordedRun& run);
double answers_of(const RecordedRun& run);
double hard_answers_of(const RecordedRun& run);

// The arms of a record under their own names, but for the one of this name.
std::vector<LabelledArm> arms_but(const Record& record, const std::string& name);

// Of an arm against its baseline: "-0.1234 ± 0.0567", and in a word what that says.
std::string difference_text(const Verdict& verdict, const char* format);
std::string verdict_text(const RecordedArm& arm, const RecordedArm& baseline, const Verdict& verdict);
// All arms of a baseline, judged together (eval/dunnett.h). A verdict for each, empty of the baseline itself.
FamilyVerdict judge(const RecordedArm& baseline, const std::vector<LabelledArm>& arms,
                    const std::vector<RecordedArm>& beside = {});
// Its dots: the differences seed by seed, of the seeds that both have.
DotRow dots_of(const LabelledArm& arm, const RecordedArm& baseline, const Verdict& verdict);
constexpr const char* about_differences =
    "difference of test losses, nats (left: better); mean, 95 % interval of the family, one dot per seed";

class Page {
 public:
  // Of the records in this directory. finish() writes its results.md, where there is anything in it.
  Page(std::string directory, std::string title) : directory_(std::move(directory)), title_(std::move(title)) {}

  // Nothing where there is no such file. ../ goes to another experiment's.
  std::optional<Record> record(const std::string& name) const;
  // The difference of test losses from the baseline's: dot chart and tables. All groups of a baseline are one family,
  // to whose deviation arms `beside` it contribute. Throws Exit::bad_data where two that are compared have other data,
  // sizes or schedules.
  void differences(const std::string& file, const std::string& title, const std::vector<ComparedArms>& groups,
                   const std::vector<RecordedArm>& beside = {});
  // The answers after the last step, as a dot chart and a table.
  void answers(const std::string& file, const std::string& title, const std::vector<DotGroup>& groups);
  // Means over the seeds, in bands: answers over updates, or where there are none the test loss over tokens.
  void curves(const std::string& file, const std::string& title, const std::vector<LabelledArm>& arms);
  void picture(const std::string& file, const std::string& svg);
  void markdown(const std::string& text) { markdown_ += text; }
  void finish() const;

 private:
  std::string directory_, title_, markdown_;
};

}  // namespace crossply::figures
