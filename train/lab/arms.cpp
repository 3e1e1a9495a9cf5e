// The arms of a comparison: which learning rates are tried, which is the best, and which are tried beyond an edge.
#include <algorithm>
#include <cmath>

#include "cli/bounds.h"
#include "cli/format.h"
#include "engine/numbers.h"
#include "train/lab/comparison.h"

namespace crossply {
namespace {

constexpr size_t max_beyond = 3;  // rates that are added to an arm's grid

template <class T>
void add_new(std::vector<T>& values, T value) {
  if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
}

double& rate_of(TrainPlan& plan) { return has_muon(plan.optimizer) ? plan.muon.lr : plan.lr; }

uint64_t seed_that_chooses(const Comparison& comparison) {
  return comparison.choosing_seed.value_or(comparison.runs[0].plan.seed);
}

// The first choice by the seed that chooses, and the rate that an arm is judged at, so far: of those at which a seed
// diverged only where there are no others.
void choose_rate(const Comparison& comparison, const std::vector<size_t>& all, Arm& arm) {
  const auto works_at = [&](double rate) {
    return std::none_of(all.begin(), all.end(),
                        [&](size_t k) { return rate_of(comparison.runs[k]) == rate && diverged(comparison.runs[k]); });
  };
  double least = INFINITY, of_rate = INFINITY;
  for (const size_t i : arm.sweep) {
    const ComparedRun& first = comparison.runs[i];
    const double loss = first.result.test_loss, rate = rate_of(first);
    if (!is_done(first) || !std::isfinite(loss)) continue;
    if (loss < least) least = loss, arm.first_choice = rate;
    const bool works = works_at(rate);
    if (works < arm.works || (works == arm.works && loss >= of_rate)) continue;
    of_rate = loss, arm.rate = rate, arm.works = works;
  }
  const double any = rate_of(comparison.runs[arm.sweep.empty() ? all[0] : arm.sweep[0]]);
  if (arm.sweep.size() < 2) arm.rate = arm.first_choice = any, arm.works = works_at(any);
  for (const size_t k : all) {
    const ComparedRun& run = comparison.runs[k];
    const bool reported = !comparison.choosing_seed || !chooses(comparison, run);
    if (reported && rate_of(run) == (std::isnan(arm.rate) ? any : arm.rate)) arm.seeds.push_back(k);
  }
}

// Is all of its sweep done or diverged?
bool is_swept(const Comparison& comparison, const Arm& arm) {
  return std::none_of(arm.sweep.begin(), arm.sweep.end(), [&](size_t i) { return is_unfinished(comparison.runs[i]); });
}

bool at_edge(const Comparison& comparison, const Arm& arm, double rate) {
  return arm.sweep.size() > 1 &&
         (rate == rate_of(comparison.runs[arm.sweep.front()]) || rate == rate_of(comparison.runs[arm.sweep.back()]));
}

// An arm's next rate, once all are tried: as far beyond the edge as that is from its neighbour, but not more than ten
// times. Three digits, so that people can read it.
std::optional<double> rate_beyond(const Comparison& comparison, const Arm& arm) {
  if (!comparison.choosing_seed || !is_swept(comparison, arm) || !at_edge(comparison, arm, arm.first_choice) ||
      arm.sweep.size() >= rates_asked(comparison, arm.optimizer).size() + max_beyond)
    return {};
  const auto rate = [&](size_t place) { return rate_of(comparison.runs[arm.sweep[place]]); };
  const double edge = arm.first_choice, neighbour = edge == rate(0) ? rate(1) : rate(arm.sweep.size() - 2);
  const double beyond = parse_number(format_number("%.3g", edge * std::clamp(edge / neighbour, 0.1, 10.0))).value_or(0);
  if (!(beyond > 0 && beyond <= max_number)) return {};
  return beyond;
}

// The arm of the same architecture whose best --lr an arm of Muon takes; null where it is of AdamW, or alone.
const Arm* leader_of(const std::vector<Arm>& arms, const Arm& arm) {
  if (!has_muon(arm.optimizer)) return nullptr;
  for (const Arm& other : arms)
    if (!has_muon(other.optimizer) && other.arch == arm.arch) return &other;
  return nullptr;
}

Arm arm_of(const Comparison& comparison, const ComparedRun& like) {
  Arm arm{arm_name(comparison, like), like.choice.text, like.plan.optimizer, {}, {}};
  std::vector<size_t> all;
  for (size_t i = 0; i < comparison.runs.size(); ++i)
    if (is_of(comparison.runs[i], arm)) all.push_back(i);
  for (const size_t i : all)
    if (chooses(comparison, comparison.runs[i])) arm.sweep.push_back(i);
  std::stable_sort(arm.sweep.begin(), arm.sweep.end(),
                   [&](size_t a, size_t b) { return rate_of(comparison.runs[a]) < rate_of(comparison.runs[b]); });
  choose_rate(comparison, all, arm);
  const bool swept = is_swept(comparison, arm);
  arm.at_edge = swept && at_edge(comparison, arm, arm.rate);
  arm.settled = arm.sweep.size() < 2 || (swept && !rate_beyond(comparison, arm));
  return arm;
}

// AdamW's first choice is the --lr of Muon's other parameters, too: all of Muon's runs have the same, whatever becomes
// of AdamW's other seeds. Where AdamW works at no rate it is the smallest.
bool follow(Comparison& comparison, const std::vector<Arm>& arms) {
  bool changed = false;
  for (ComparedRun& run : comparison.runs) {
    const auto arm = std::find_if(arms.begin(), arms.end(), [&](const Arm& one) { return is_of(run, one); });
    const Arm* leader = leader_of(arms, *arm);
    if (leader == nullptr || !leader->settled || run.state != RunState::waiting || run.tried) continue;
    const double lr =
        std::isfinite(leader->first_choice) ? leader->first_choice : rate_of(comparison.runs[leader->sweep[0]]);
    if (run.plan.lr == lr) continue;
    run.plan.lr = lr, run.directory.clear(), changed = true;
  }
  return changed;
}

bool add_rates_beyond(Comparison& comparison) {
  bool any = false;
  for (const Arm& arm : arms_of(comparison))
    if (const auto rate = rate_beyond(comparison, arm)) add_beyond(comparison, arm, *rate), any = true;
  return any;
}

}  // namespace

bool is_of(const ComparedRun& run, const Arm& arm) {
  return run.choice.text == arm.arch && run.plan.optimizer == arm.optimizer;
}

double rate_of(const ComparedRun& run) { return has_muon(run.plan.optimizer) ? run.plan.muon.lr : run.plan.lr; }

const std::vector<double>& rates_asked(const Comparison& comparison, const std::string& optimizer) {
  return has_muon(optimizer) ? comparison.muon_rates : comparison.rates;
}

bool chooses(const Comparison& comparison, const ComparedRun& run) {
  return run.plan.seed == seed_that_chooses(comparison);
}

std::vector<uint64_t> seeds_of(const Comparison& comparison) {
  std::vector<uint64_t> seeds;
  for (const ComparedRun& run : comparison.runs)
    if (run.plan.seed != comparison.choosing_seed) add_new(seeds, run.plan.seed);
  return seeds;
}

std::vector<std::string> optimizers_of(const Comparison& comparison) {
  std::vector<std::string> names;
  for (const ComparedRun& run : comparison.runs) add_new(names, run.plan.optimizer);
  return names;
}

std::string arm_name(const Comparison& comparison, const ComparedRun& run) {
  return run.choice.text + (optimizers_of(comparison).size() > 1 ? " " + run.plan.optimizer : "");
}

std::vector<Arm> arms_of(const Comparison& comparison) {
  std::vector<Arm> arms;
  for (const ComparedRun& run : comparison.runs) {
    if (std::none_of(arms.begin(), arms.end(), [&](const Arm& arm) { return is_of(run, arm); }))
      arms.push_back(arm_of(comparison, run));
  }
  for (Arm& arm : arms) {
    const Arm* leader = leader_of(arms, arm);
    arm.waits = leader != nullptr && !leader->settled;
    arm.settled = arm.settled && !arm.waits;
  }
  return arms;
}

void add_rate(Comparison& comparison, const ComparedRun& like, double rate, const std::vector<uint64_t>& seeds) {
  std::vector<uint64_t> all = seeds;
  if (comparison.choosing_seed && rates_asked(comparison, like.plan.optimizer).size() > 1)
    all.insert(all.begin(), *comparison.choosing_seed);
  for (const uint64_t seed : all) {
    ComparedRun run = like;
    rate_of(run.plan) = rate;
    run.plan.seed = seed;
    if (comparison.choosing_seed)
      run.plan.data.test_part = seed == comparison.choosing_seed ? "first_half" : "second_half";
    run.directory.clear();
    comparison.runs.push_back(run);
  }
}

void add_beyond(Comparison& comparison, const Arm& arm, double rate) {
  const ComparedRun& like = comparison.runs[arm.seeds[0]];
  ComparedRun run{like.choice, like.plan, plan_training(like.plan)};
  run.found = true;
  add_rate(comparison, run, rate, seeds_of(comparison));
}

void name_directories(Comparison& comparison) {
  const std::vector<Arm> arms = arms_of(comparison);
  const bool one_each = comparison.runs.size() == arms.size(), several = optimizers_of(comparison).size() > 1;
  for (ComparedRun& run : comparison.runs) {
    if (!run.directory.empty()) continue;
    run.directory = run.choice.file_name() + (several ? "-" + run.plan.optimizer : "");
    if (!one_each) run.directory += "-lr-" + lr_text(run.plan.lr);
    if (!one_each && has_muon(run.plan.optimizer) && comparison.muon_rates.size() > 1)
      run.directory += "-muon-lr-" + lr_text(run.plan.muon.lr);
    if (!one_each) run.directory += str("-seed-", run.plan.seed);
    run.plan.out = run.result.run_dir = comparison.out + "/" + run.directory;
  }
}

std::vector<size_t> needed(const Arm& arm) {
  std::vector<size_t> out = arm.sweep;
  if (arm.settled && std::isfinite(arm.rate))
    for (const size_t i : arm.seeds) add_new(out, i);
  return out;
}

bool extend(Comparison& comparison) {
  bool any = false;
  for (bool changed = true; changed; any |= changed) {
    changed = take_others(comparison);
    changed |= add_rates_beyond(comparison);
    changed |= follow(comparison, arms_of(comparison));
    name_directories(comparison);
  }
  return any;
}

const Arm* first_architecture(const std::vector<Arm>& arms, const Arm& arm) {
  for (const Arm& other : arms)
    if (other.optimizer == arm.optimizer) return other.arch == arm.arch ? nullptr : &other;
  return nullptr;
}

const Arm* first_optimizer(const std::vector<Arm>& arms, const Arm& arm) {
  for (const Arm& other : arms)
    if (other.arch == arm.arch) return other.optimizer == arm.optimizer ? nullptr : &other;
  return nullptr;
}

}  // namespace crossply
