#include "dev/figures/page.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>
#include <span>

#include "cli/format.h"
#include "engine/io/file.h"
#include "train/lab/comparison.h"
#include "train/run/run_curves.h"

namespace crossply::figures {
namespace {

bool is_baseline(const LabelledArm& arm, const RecordedArm& baseline) { return arm.label == baseline.name; }

std::vector<std::string> row_of(const LabelledArm& labelled, const RecordedArm& baseline, const Verdict& verdict) {
  const RecordedArm& arm = labelled.arm;
  const Spread loss = spread_of(values_of(arm, test_loss_of));
  const RecordedRun& run = arm.runs.begin()->second;
  const bool own = is_baseline(labelled, baseline);
  return {labelled.label,
          format_count(static_cast<int64_t>(run.parameters)),
          format_number("%.4g", run.flops_per_token),
          rates_of(arm),
          str(loss.n, arm.lost.empty() ? "" : str(", ", arm.lost.size(), " failed")),
          format_number("%.4f", loss.mean) + (loss.n > 1 ? format_number(" ± %.4f", loss.sd) : ""),
          own ? "" : difference_text(verdict, "%.4f"),
          own ? "" : verdict_text(arm, baseline, verdict)};
}

std::string table_of(const ComparedArms& group, std::span<const Verdict> verdicts) {
  std::string out = group.caption.empty() ? "" : "**" + group.caption + "**\n\n";
  out += format_markdown_row(
             {"", "parameters", "FLOP/token", "lr", "seeds", "test loss", "against " + group.baseline.name, ""}) +
         "|---|---|---|---|---|---|---|---|\n";
  for (size_t i = 0; i < group.arms.size(); ++i)
    out += format_markdown_row(row_of(group.arms[i], group.baseline, verdicts[i]));
  return out + "\n";
}

// What the intervals of a family come from, in a line; "" where there are none.
std::string family_text(const RecordedArm& baseline, const FamilyVerdict& family) {
  if (!std::isfinite(family.critical)) return "";
  return str("Against ", baseline.name, ": deviation", family.blocks ? " of what arms and seeds leave " : " ",
             format_number("%.4f", family.arms_sd), ", ", family.arms_degrees, " degrees of freedom",
             family.backbone_degrees == 0
                 ? ""
                 : str(" (its own ", format_number("%.4f", family.backbone_sd), ", ", family.backbone_degrees, ")"),
             ", critical value ", format_number("%.3f", family.critical),
             "; 80 % of repeats would find a difference of ", format_number("%.4f", detectable_difference(family)),
             ".\n\n");
}

bool have_same_baseline(const ComparedArms& a, const ComparedArms& b) {
  return a.baseline.name == b.baseline.name &&
         values_of(a.baseline, test_loss_of) == values_of(b.baseline, test_loss_of);
}

void check_settings(const ComparedArms& group, const std::string& directory) {
  for (const LabelledArm& one : group.arms)
    if (one.arm.setting != group.baseline.setting)
      fail(Exit::bad_data, directory, ": ", one.label, " and ", group.baseline.name,
           " cannot be compared, their data, sizes or schedules differ: ", one.arm.setting, " and ",
           group.baseline.setting, "; make the older record again");
}

// A mean over the seeds of what every run has at these steps.
Curve mean_curve(const LabelledArm& labelled, bool answers) {
  std::vector<SteppedCurve> curves;
  for (const auto& [seed, run] : labelled.arm.runs) {
    const std::vector<double>&at = answers ? run.answer_step : run.step, &y = answers ? run.share : run.loss;
    const double scale = answers || at.empty() ? 1 : static_cast<double>(run.tokens) / at.back();
    SteppedCurve curve{at, {}, y};
    for (const double step : at) curve.x.push_back(step * scale);
    curves.push_back(curve);
  }
  Curve curve = mean_of(curves).curve;
  curve.name = labelled.label;
  return curve;
}

// "lime ahead of llama with 4 of 5 seeds, by 12.3 points on average": of the second row against the first.
std::string paired_answers(const DotGroup& group) {
  if (group.rows.size() < 2 || group.rows[0].values.size() < 2) return "";
  const std::vector<double>& first = group.rows[0].values;
  std::string out;
  for (size_t i = 1; i < group.rows.size(); ++i) {
    const std::vector<double>& values = group.rows[i].values;
    if (values.size() != first.size()) continue;
    double sum = 0;
    size_t ahead = 0;
    for (size_t s = 0; s < values.size(); ++s) sum += values[s] - first[s], ahead += values[s] > first[s];
    out += str("* ", group.caption, group.caption.empty() ? "" : ": ", group.rows[i].label, " ahead of ",
               group.rows[0].label, " with ", ahead, " of ", values.size(), " seeds, by ",
               format_number("%+.1f", 100 * sum / static_cast<double>(values.size())), " points on average\n");
  }
  return out;
}

// ": llama, lime", or how many there are.
std::string models_of(const std::vector<LabelledArm>& arms) {
  std::string names;
  for (const LabelledArm& one : arms) names += (names.empty() ? "" : ", ") + one.label;
  return ": " + (names.size() <= 32 ? names : str(arms.size(), " models"));
}

}  // namespace

std::string rates_of(const RecordedArm& arm) {
  return lr_text(arm.lr) + (std::isfinite(arm.muon_lr) ? ", muon " + lr_text(arm.muon_lr) : "") +
         (arm.at_edge ? " (edge)" : "");
}

double test_loss_of(const RecordedRun& run) { return run.test_loss; }
double answers_of(const RecordedRun& run) { return run.answers; }
double hard_answers_of(const RecordedRun& run) { return run.hard_answers; }

std::vector<LabelledArm> arms_but(const Record& record, const std::string& name) {
  std::vector<LabelledArm> arms;
  for (const RecordedArm& arm : record.arms)
    if (arm.name != name) arms.push_back({arm.name, arm});
  return arms;
}

std::string difference_text(const Verdict& verdict, const char* format) {
  if (!std::isfinite(verdict.difference)) return "";
  return (verdict.difference < 0 ? "-" : "+") + format_number(format, std::abs(verdict.difference)) +
         (verdict.tested ? " ± " + format_number(format, verdict.interval) : "");
}

std::string verdict_text(const RecordedArm& arm, const RecordedArm& baseline, const Verdict& verdict) {
  if (losses_of(arm).diverged() || losses_of(baseline).diverged()) return "a seed failed";
  if (!verdict.tested) return "one seed";
  const char* word = !verdict.found ? "cannot be told" : verdict.difference < 0 ? "**lower**" : "**higher**";
  return word + std::string(verdict.welch ? ", by its own deviation" : "");
}

FamilyVerdict judge(const RecordedArm& baseline, const std::vector<LabelledArm>& arms,
                    const std::vector<RecordedArm>& beside) {
  std::vector<ArmLosses> losses;
  std::set<std::string> names = {baseline.name};
  for (const LabelledArm& one : arms) {
    losses.push_back(is_baseline(one, baseline) ? ArmLosses{} : losses_of(one.arm));
    names.insert(one.arm.name);
  }
  for (const RecordedArm& arm : beside)
    if (arm.setting == baseline.setting && names.insert(arm.name).second) losses.push_back(losses_of(arm));
  for (const size_t place : unsteady(losses)) losses[place].unsteady = true;
  const auto end = losses.begin() + static_cast<std::ptrdiff_t>(arms.size());
  return against_backbone(losses_of(baseline), {losses.begin(), end}, {end, losses.end()});
}

DotRow dots_of(const LabelledArm& arm, const RecordedArm& baseline, const Verdict& verdict) {
  return {arm.label, differences_of(arm.arm, baseline, test_loss_of), verdict.tested ? verdict.interval : NAN,
          verdict.difference};
}

std::optional<Record> Page::record(const std::string& name) const {
  const std::string path = directory_ + "/" + name + ".json";
  if (!path_exists(path)) return std::nullopt;
  return read_record(path);
}

void Page::differences(const std::string& file, const std::string& title, const std::vector<ComparedArms>& groups,
                       const std::vector<RecordedArm>& beside) {
  DotChart chart{title, about_differences, {}, false, true};
  std::string tables;
  for (size_t i = 0; i < groups.size(); ++i) {
    const ComparedArms& group = groups[i];
    check_settings(group, directory_);
    std::vector<LabelledArm> family;
    size_t first = 0;
    for (const ComparedArms& other : groups) {
      if (!have_same_baseline(group, other)) continue;
      if (&other == &group) first = family.size();
      family.insert(family.end(), other.arms.begin(), other.arms.end());
    }
    const FamilyVerdict judged = judge(group.baseline, family, beside);
    const auto verdicts = std::span(judged.arms).subspan(first, group.arms.size());
    DotGroup dots{group.caption, {}};
    for (size_t k = 0; k < group.arms.size(); ++k)
      if (!is_baseline(group.arms[k], group.baseline))
        dots.rows.push_back(dots_of(group.arms[k], group.baseline, verdicts[k]));
    if (dots.rows.empty()) continue;
    chart.groups.push_back(dots);
    tables += table_of(group, verdicts);
    if (i + 1 == groups.size() || !have_same_baseline(group, groups[i + 1]))
      tables += family_text(group.baseline, judged);
  }
  if (chart.groups.empty()) return;
  picture(file, dots_svg(chart));
  markdown_ += "## " + title + "\n\n![" + title + "](" + file + ")\n\n" + tables;
}

void Page::answers(const std::string& file, const std::string& title, const std::vector<DotGroup>& groups) {
  if (groups.empty()) return;
  picture(file, dots_svg({title, "correct answers after the last step; mean, one dot per seed", groups, true, false}));
  std::string notes;
  markdown_ += "## " + title + "\n\n![" + title + "](" + file + ")\n\n" +
               format_markdown_row({"", "", "seeds", "mean", "standard deviation", "past 50 %", "every seed"}) +
               "|---|---|---|---|---|---|---|\n";
  for (const DotGroup& group : groups) {
    notes += paired_answers(group);
    for (const DotRow& row : group.rows) {
      const Spread spread = spread_of(row.values);
      std::string all;
      for (const double value : row.values) all += (all.empty() ? "" : " ") + format_number("%.1f", 100 * value);
      markdown_ +=
          format_markdown_row({group.caption, row.label, str(spread.n), format_number("%.1f %%", 100 * spread.mean),
                               spread.n > 1 ? format_number("%.1f", 100 * spread.sd) : "",
                               str(std::ranges::count_if(row.values, [](double share) { return share > 0.5; })), all});
    }
  }
  markdown_ += "\n" + notes + (notes.empty() ? "" : "\n");
}

void Page::curves(const std::string& file, const std::string& subject, const std::vector<LabelledArm>& arms) {
  const std::string title = subject + models_of(arms);
  std::vector<Curve> losses, answers;
  for (const LabelledArm& arm : arms) {
    losses.push_back(mean_curve(arm, false));
    if (Curve curve = mean_curve(arm, true); !curve.x.empty()) answers.push_back(curve);
  }
  const bool several = std::ranges::any_of(arms, [](const LabelledArm& one) { return one.arm.runs.size() > 1; });
  const std::string bands = several ? str("; ", about_bands) : "; one seed";
  if (answers.empty()) picture(file, curve_svg(title, "tokens", {{"test loss" + bands, "", losses}}));
  else picture(file, curve_svg(title, "step", {{"correct answers" + bands, "", answers, true}}));
  markdown_ += "## " + title + "\n\n![" + title + "](" + file + ")\n\n";
}

void Page::picture(const std::string& file, const std::string& svg) {
  write_file_atomically(directory_ + "/" + file, svg);
  std::printf("%s/%s\n", directory_.c_str(), file.c_str());
}

void Page::finish() const {
  if (markdown_.empty()) return;
  const std::string path = directory_ + "/results.md";
  write_file_atomically(path, "# " + title_ +
                                  "\n\nWritten by `make figures` from the records beside it; how to read it: "
                                  "[docs/claims.md](../../../docs/claims.md).\n\n" +
                                  markdown_);
  std::printf("%s\n", path.c_str());
}

}  // namespace crossply::figures
