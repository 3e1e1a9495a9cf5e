// Which arms of a comparison are judged together, and what is said of each.
#include <algorithm>

#include "cli/format.h"
#include "train/lab/comparison.h"

namespace crossply {
namespace {

void add_losses(const Comparison& comparison, const std::vector<size_t>& places, ArmLosses& out) {
  for (const size_t i : places)
    if (const ComparedRun& run = comparison.runs[i]; is_done(run) || diverged(run))
      out.seeds.push_back({run.plan.seed, is_done(run) ? run.result.test_loss : NAN});
}

// An arm's further seeds count where its spread is unlike the others'. Those of the best arms do not: the best of many
// looks better than it is, and its further seeds are there to show that.
Family family_of(const Comparison& comparison, const Arm& baseline, const std::vector<const Arm*>& arms) {
  std::vector<ArmLosses> losses;
  for (const Arm* arm : arms)
    losses.push_back(arm->settled && baseline.settled ? losses_of(comparison, *arm) : ArmLosses{arm->name, {}});
  for (const size_t place : unsteady(losses)) {
    losses[place].unsteady = true;
    add_losses(comparison, arms[place]->more, losses[place]);
  }
  FamilyVerdict verdict = against_backbone(losses_of(comparison, baseline), losses);
  return {&baseline, arms, std::move(verdict), std::move(losses)};
}

template <class BaselineOf>
std::vector<Family> families(const Comparison& comparison, const std::vector<Arm>& arms, BaselineOf&& baseline_of) {
  std::vector<Family> out;
  if (comparison.rules.every_rate) return out;  // that is no comparison of architectures, each at its best
  for (const Arm& baseline : arms) {
    std::vector<const Arm*> others;
    for (const Arm& arm : arms)
      if (baseline_of(arms, arm) == &baseline) others.push_back(&arm);
    if (!others.empty()) out.push_back(family_of(comparison, baseline, others));
  }
  return out;
}

}  // namespace

ArmLosses losses_of(const Comparison& comparison, const Arm& arm) {
  ArmLosses out{arm.name, {}};
  add_losses(comparison, arm.seeds, out);
  return out;
}

size_t Family::place_of(const Arm& arm) const {
  const auto place = std::find_if(arms.begin(), arms.end(), [&](const Arm* one) { return one->name == arm.name; });
  return static_cast<size_t>(place - arms.begin());
}

bool Family::has(const Arm& arm) const { return place_of(arm) < arms.size(); }

std::vector<Family> families_of_architectures(const Comparison& comparison, const std::vector<Arm>& arms) {
  return families(comparison, arms, first_architecture);
}

std::vector<Family> families_of_controls(const Comparison& comparison, const std::vector<Arm>& arms) {
  std::vector<Family> out;
  if (comparison.rules.every_rate) return out;
  std::vector<std::pair<ArmLosses, ArmLosses>> pairs;
  for (const Arm& arm : arms)
    if (const Arm* control = control_of(arms, arm); control != nullptr && arm.settled) {
      out.push_back({control, {&arm}, {}, {losses_of(comparison, arm)}});
      pairs.emplace_back(losses_of(comparison, *control), losses_of(comparison, arm));
    }
  const std::vector<FamilyVerdict> verdicts = against_controls(pairs);
  for (size_t i = 0; i < out.size(); ++i) out[i].verdict = verdicts[i];
  return out;
}

std::vector<Family> families_of_optimizers(const Comparison& comparison, const std::vector<Arm>& arms) {
  return families(comparison, arms, first_optimizer);
}

std::string verdict_text(const Comparison& comparison, const Family& family, const Arm& arm) {
  if (!arm.settled || !family.baseline->settled) return "a best rate is not known yet: cannot be told";
  const ArmLosses losses = losses_of(comparison, arm), baseline = losses_of(comparison, *family.baseline);
  const size_t n = losses.losses().size(), all = arm.seeds.size();
  if (n == 0 || baseline.losses().empty()) return "no seed has ended for both: cannot be told";
  const Verdict& verdict = family.of(arm);
  const std::string size = verdict.difference == 0 ? "the same"
                                                   : str(verdict.difference < 0 ? "lower by " : "higher by ",
                                                         format_number("%.4f", std::abs(verdict.difference)));
  if (losses.diverged() || baseline.diverged())
    return size + str("; a seed of ", losses.diverged() ? arm.name : family.baseline->name, " diverged: not judged");
  if (!verdict.tested) return size + " with one seed: whether seeds differ by as much cannot be told";
  return size + " +- " + format_number("%.4f", verdict.interval) + (n == all ? "" : str(" (", n, " seeds)")) +
         (verdict.found ? ": significant" : ": not significant");
}

}  // namespace crossply
