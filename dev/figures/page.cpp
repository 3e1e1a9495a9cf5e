#include "dev/figures/page.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

#include "cli/format.h"
#include "engine/io/file.h"
#include "train/lab/comparison.h"
#include "train/run/run_curves.h"

namespace crossply::figures {
namespace {

std::string signed_text(double value) { return (value < 0 ? "-" : "+") + format_number("%.4f", std::abs(value)); }

std::string verdict_of(double difference, int64_t n, double half) {
  if (n == 1) return "one seed";
  if (!std::isfinite(half)) return "";
  if (std::abs(difference) <= half) return "cannot be told";
  return difference < 0 ? "**lower**" : "**higher**";
}

std::vector<std::string> row_of(const LabelledArm& labelled, const RecordedArm& yardstick, const Residual& residual) {
  const RecordedArm& arm = labelled.arm;
  const Spread loss = spread_of(values_of(arm, test_loss_of));
  const Spread difference = spread_of(differences_of(arm, yardstick, test_loss_of));
  const double half = residual.interval(difference.n);
  const RecordedRun& run = arm.runs.begin()->second;
  const bool other = labelled.label != yardstick.name && difference.n > 0;
  return {labelled.label,
          format_count(static_cast<int64_t>(run.parameters)),
          format_number("%.4g", run.flops_per_token),
          rates_of(arm),
          str(loss.n, arm.lost > 0 ? str(", ", arm.lost, " failed") : ""),
          format_number("%.4f", loss.mean) + (loss.n > 1 ? format_number(" ± %.4f", loss.sd) : ""),
          !other ? "" : signed_text(difference.mean) + (std::isfinite(half) ? format_number(" ± %.4f", half) : ""),
          !other ? "" : verdict_of(difference.mean, difference.n, half)};
}

std::string table_of(const ComparedArms& group, const Residual& residual) {
  std::string out = group.caption.empty() ? "" : "**" + group.caption + "**\n\n";
  out += format_markdown_row(
             {"", "parameters", "FLOP/token", "lr", "seeds", "test loss", "against " + group.yardstick.name, ""}) +
         "|---|---|---|---|---|---|---|---|\n";
  for (const LabelledArm& arm : group.arms) out += format_markdown_row(row_of(arm, group.yardstick, residual));
  return out + "\n";
}

std::vector<RecordedArm> all_of(const ComparedArms& group) {
  std::vector<RecordedArm> arms = {group.yardstick};
  for (const LabelledArm& one : group.arms)
    if (one.label != group.yardstick.name) arms.push_back(one.arm);
  return arms;
}

void check_settings(const ComparedArms& group, const std::string& directory) {
  for (const LabelledArm& one : group.arms)
    if (one.arm.setting != group.yardstick.setting)
      fail(Exit::bad_data, directory, ": ", one.label, " and ", group.yardstick.name,
           " cannot be compared, their data, sizes or schedules differ: ", one.arm.setting, " and ",
           group.yardstick.setting, "; make the older record again");
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

// The losses of the arms that have all of these seeds, a row each.
std::vector<std::vector<double>> rows_with(const std::vector<RecordedArm>& arms, const std::set<uint64_t>& seeds,
                                           RunMeasure measure) {
  std::vector<std::vector<double>> rows;
  for (const RecordedArm& arm : arms) {
    std::vector<double> row;
    for (const auto& [seed, run] : arm.runs)
      if (seeds.contains(seed) && std::isfinite(measure(run))) row.push_back(measure(run));
    if (row.size() == seeds.size()) rows.push_back(row);
  }
  return rows;
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

void Residual::add(const std::vector<RecordedArm>& arms, RunMeasure measure) {
  std::set<uint64_t> seeds;
  std::vector<std::vector<double>> rows;
  const auto degrees_of = [](const auto& table, const auto& columns) {
    return table.empty() || columns.empty() ? 0 : (table.size() - 1) * (columns.size() - 1);
  };
  for (const RecordedArm& arm : arms) {
    std::set<uint64_t> own;
    for (const auto& [seed, run] : arm.runs) own.insert(seed);
    const auto having = rows_with(arms, own, measure);
    if (degrees_of(having, own) > degrees_of(rows, seeds)) seeds = own, rows = having;
  }
  if (rows.size() < 2 || seeds.size() < 2) return;
  const double A = static_cast<double>(rows.size()), S = static_cast<double>(seeds.size());
  std::vector<double> of_seed(seeds.size());
  double all = 0;
  for (const auto& row : rows)
    for (size_t s = 0; s < row.size(); ++s) of_seed[s] += row[s] / A, all += row[s] / (A * S);
  for (const auto& row : rows) {
    const double mean = spread_of(row).mean;
    for (size_t s = 0; s < row.size(); ++s) {
      const double rest = row[s] - mean - of_seed[s] + all;
      squares += rest * rest;
    }
  }
  degrees += static_cast<int64_t>((rows.size() - 1) * (seeds.size() - 1));
}

double Residual::interval(int64_t n) const {
  if (degrees < 1 || n < 1) return NAN;
  return student_t95(degrees) * std::sqrt(2 * squares / static_cast<double>(degrees) / static_cast<double>(n));
}

std::optional<Record> Page::record(const std::string& name) const {
  const std::string path = directory_ + "/" + name + ".json";
  if (!path_exists(path)) return std::nullopt;
  return read_record(path);
}

void Page::differences(const std::string& file, const std::string& title, const std::vector<ComparedArms>& groups,
                       const std::vector<RecordedArm>& pool) {
  DotChart chart{
      title, "difference of test losses, nats (left: better); mean, 95 % interval, one dot per seed", {}, false, true};
  Residual residual;
  residual.add(pool, test_loss_of);
  for (const ComparedArms& group : groups) {
    check_settings(group, directory_);
    if (pool.empty()) residual.add(all_of(group), test_loss_of);
  }
  std::string tables;
  for (const ComparedArms& group : groups) {
    DotGroup dots{group.caption, {}};
    for (const LabelledArm& one : group.arms) {
      if (one.label == group.yardstick.name) continue;
      const std::vector<double> values = differences_of(one.arm, group.yardstick, test_loss_of);
      dots.rows.push_back({one.label, values, residual.interval(static_cast<int64_t>(values.size()))});
    }
    if (dots.rows.empty()) continue;
    chart.groups.push_back(dots);
    tables += table_of(group, residual);
  }
  if (chart.groups.empty()) return;
  picture(file, dots_svg(chart));
  markdown_ += "## " + title + "\n\n![" + title + "](" + file + ")\n\n" + tables;
  if (residual.degrees > 0)
    markdown_ +=
        str("Intervals: from the residual of architecture + seed, pooled, ", residual.degrees,
            " degrees of freedom, standard deviation ",
            format_number("%.4f", std::sqrt(residual.squares / static_cast<double>(residual.degrees))), ".\n\n");
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
