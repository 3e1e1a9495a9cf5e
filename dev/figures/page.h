// What figures makes of the records of one experiment: pictures, and results.md with every number beside them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dev/figures/dots.h"
#include "dev/figures/record.h"

namespace crossply {

struct LabelledArm {
  std::string label;
  RecordedArm arm;
};
// Arms that are compared with one of them, or with one from elsewhere.
struct ComparedArms {
  std::string caption;
  RecordedArm yardstick;
  std::vector<LabelledArm> arms;
};

double test_loss_of(const RecordedRun& run);
double answers_of(const RecordedRun& run);

// The arms of a record under their own names, but for the one of this name.
std::vector<LabelledArm> arms_but(const Record& record, const std::string& name);

class Page {
 public:
  // Of the records in this directory. Its results.md and pictures are written by finish(), where there is any.
  Page(std::string directory, std::string title) : directory_(std::move(directory)), title_(std::move(title)) {}

  // Nothing where there is no such file. ../ goes to another experiment's.
  std::optional<Record> record(const std::string& name) const;
  // The difference of test losses from the yardstick's, seed by seed, as a dot chart and a table.
  void differences(const std::string& file, const std::string& title, const std::vector<ComparedArms>& groups);
  // The answers after the last step, as a dot chart and a table.
  void answers(const std::string& file, const std::string& title, const std::vector<DotGroup>& groups);
  // Means over the seeds, in bands: the test loss over the tokens, and where there are some the answers.
  void curves(const std::string& file, const std::string& title, const std::vector<LabelledArm>& arms);
  void picture(const std::string& file, const std::string& svg);
  void markdown(const std::string& text) { markdown_ += text; }
  void finish() const;

 private:
  std::string directory_, title_, markdown_;
};

}  // namespace crossply
