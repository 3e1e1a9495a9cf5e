#include "dev/figures/page.h"

#include <cmath>
#include <cstdio>

#include "cli/format.h"
#include "engine/file.h"
#include "train/comparison.h"
#include "train/run_curves.h"

namespace crossply {
namespace {

std::string signed_text(double value, int decimals) {
  const std::string digits = format_number(decimals == 4 ? "%.4f" : "%.1f", std::abs(value));
  return (value < 0 ? "-" : "+") + digits;
}

std::string verdict_of(const Spread& difference) {
  if (difference.n < 2) return "one seed";
  if (!difference.differs_from_zero()) return "within the spread of seeds";
  return difference.mean < 0 ? "**lower**" : "**higher**";
}

std::vector<std::string> row_of(const LabelledArm& labelled, const RecordedArm& yardstick) {
  const RecordedArm& arm = labelled.arm;
  const Spread loss = spread_of(values_of(arm, test_loss_of));
  const Spread difference = spread_of(differences_of(arm, yardstick, test_loss_of));
  const RecordedRun& run = arm.runs.begin()->second;
  return {labelled.label,
          format_count(static_cast<int64_t>(run.parameters)),
          format_number("%.4g", run.flops_per_token),
          lr_text(arm.lr) + (arm.at_edge ? " (edge)" : ""),
          str(loss.n),
          format_number("%.4f", loss.mean) + (loss.n > 1 ? format_number(" ± %.4f", loss.sd) : ""),
          difference.n == 0 ? ""
                            : signed_text(difference.mean, 4) +
                                  (difference.n > 1 ? format_number(" ± %.4f", difference.interval()) : ""),
          difference.n == 0 ? "" : verdict_of(difference)};
}

std::string table_of(const ComparedArms& group) {
  std::string out = group.caption.empty() ? "" : "**" + group.caption + "**\n\n";
  out += format_markdown_row(
             {"", "parameters", "FLOP/token", "lr", "seeds", "test loss", "against " + group.yardstick.name, ""}) +
         "|---|---|---|---|---|---|---|---|\n";
  for (const LabelledArm& arm : group.arms) out += format_markdown_row(row_of(arm, group.yardstick));
  return out + "\n";
}

// A mean over the seeds of what every run has at these steps.
Curve mean_curve(const LabelledArm& labelled, bool answers) {
  std::vector<SteppedCurve> curves;
  for (const auto& [seed, run] : labelled.arm.runs) {
    const std::vector<double>&at = answers ? run.answer_step : run.step, &y = answers ? run.share : run.loss;
    const double each = at.empty() ? 1 : static_cast<double>(run.tokens) / run.step.back();
    SteppedCurve curve{at, {}, y};
    for (const double step : at) curve.x.push_back(step * (answers ? 1 : each));
    if (answers) curve.x = at;
    curves.push_back(curve);
  }
  Curve curve = mean_of(curves).curve;
  curve.name = labelled.label;
  return curve;
}

}  // namespace

double test_loss_of(const RecordedRun& run) { return run.test_loss; }
double answers_of(const RecordedRun& run) { return run.answers; }

std::vector<LabelledArm> arms_but(const Record& record, const std::string& name) {
  std::vector<LabelledArm> arms;
  for (const RecordedArm& arm : record.arms())
    if (arm.name != name) arms.push_back({arm.name, arm});
  return arms;
}

std::optional<Record> Page::record(const std::string& name) const {
  const std::string path = directory_ + "/" + name + ".json";
  if (!path_exists(path)) return std::nullopt;
  return read_record(path);
}

void Page::differences(const std::string& file, const std::string& title, const std::vector<ComparedArms>& groups) {
  DotChart chart{title, "difference of test losses, in nats (left: better)", {}, false, true};
  std::string tables;
  for (const ComparedArms& group : groups) {
    if (group.arms.empty()) continue;
    DotGroup dots{group.caption, {}};
    for (const LabelledArm& arm : group.arms)
      dots.rows.push_back({arm.label, differences_of(arm.arm, group.yardstick, test_loss_of)});
    chart.groups.push_back(dots);
    tables += table_of(group);
  }
  if (chart.groups.empty()) return;
  picture(file, dots_svg(chart));
  markdown_ += "## " + title + "\n\n![" + title + "](" + file + ")\n\n" + tables;
}

void Page::answers(const std::string& file, const std::string& title, const std::vector<DotGroup>& groups) {
  if (groups.empty()) return;
  picture(file, dots_svg({title, "right answers after the last step", groups, true, false}));
  markdown_ += "## " + title + "\n\n![" + title + "](" + file + ")\n\n" +
               format_markdown_row({"", "", "seeds", "mean", "standard deviation", "every seed"}) +
               "|---|---|---|---|---|---|\n";
  for (const DotGroup& group : groups)
    for (const DotRow& row : group.rows) {
      const Spread spread = spread_of(row.values);
      std::string all;
      for (const double value : row.values) all += (all.empty() ? "" : " ") + format_number("%.1f", 100 * value);
      markdown_ +=
          format_markdown_row({group.caption, row.label, str(spread.n), format_number("%.1f %%", 100 * spread.mean),
                               spread.n > 1 ? format_number("%.1f", 100 * spread.sd) : "", all});
    }
  markdown_ += "\n";
}

void Page::curves(const std::string& file, const std::string& title, const std::vector<LabelledArm>& arms) {
  std::vector<Curve> losses, answers;
  for (const LabelledArm& arm : arms) {
    losses.push_back(mean_curve(arm, false));
    if (Curve curve = mean_curve(arm, true); !curve.x.empty()) answers.push_back(curve);
  }
  const std::string about = str("test loss; ", about_bands);
  if (answers.empty()) picture(file, curve_svg(title, "tokens", {{about, "", losses}}));
  else picture(file, curve_svg(title, "updates", {{str("right answers; ", about_bands), "", answers, true}}));
  markdown_ += "## " + title + "\n\n![" + title + "](" + file + ")\n\n";
}

void Page::picture(const std::string& file, const std::string& svg) {
  write_file_atomically(directory_ + "/" + file, svg);
  std::printf("%s/%s\n", directory_.c_str(), file.c_str());
}

void Page::finish() const {
  if (markdown_.empty()) return;
  const std::string path = directory_ + "/results.md";
  write_file_atomically(path,
                        "# " + title_ + "\n\nWritten by `make figures` from the records beside it.\n\n" +
                            "Test losses in nats: mean ± standard deviation over the seeds. Differences: seed by "
                            "seed, mean ± half of\nStudent's 95 % interval; lower or higher only where that leaves "
                            "out 0. Of twenty equals about one would be called\ndifferent.\n\n" +
                            markdown_);
  std::printf("%s\n", path.c_str());
}

}  // namespace crossply
