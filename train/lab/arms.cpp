// The arms of a comparison: which learning rates are tried, which are chosen, and which seeds follow.
#include <algorithm>
#include <cmath>
#include <map>

#include "cli/format.h"
#include "train/lab/comparison.h"
#include "train/lab/tuning.h"

namespace crossply {
namespace {

constexpr uint64_t seeds_between_twins = 100;
constexpr size_t more_seeds = 3, best_arms = 3;  // of Rules::more_seeds
constexpr size_t seeds_of_check = 3;             // of the baseline on every machine

template <class T>
void add_new(std::vector<T>& values, T value) {
  if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
}

// Where --hold-decay says so, weight decay times rate is what it is at the middle one of those that were asked for.
void set_rates(const Comparison& comparison, TrainPlan& plan, double lr, double muon_lr) {
  plan.lr = lr;
  if (has_muon(plan.optimizer)) plan.muon.lr = muon_lr;
  if (!comparison.rules.hold_decay) return;
  const bool muon = has_muon(plan.optimizer);
  plan.adamw.weight_decay =
      comparison.weight_decay * middle_rate(muon ? comparison.muon_rates : comparison.rates) / (muon ? muon_lr : lr);
}

// --- the rates of an arm -----------------------------------------------------------------------------------------

std::vector<Tried> numbers_of(const Comparison& comparison, const RateAxis& axis) {
  std::vector<Tried> out;
  for (const size_t i : axis.tried) {
    const ComparedRun& run = comparison.runs[i];
    out.push_back(
        {axis.muon ? run.plan.muon.lr : run.plan.lr, is_done(run) ? run.result.test_loss : NAN, !is_unfinished(run)});
  }
  return out;
}

RateAxis axis_of(const Comparison& comparison, bool muon, size_t asked, std::vector<size_t> tried) {
  RateAxis axis{muon, asked, std::move(tried)};
  const auto rate = [&](size_t i) {
    const TrainPlan& plan = comparison.runs[i].plan;
    return muon ? plan.muon.lr : plan.lr;
  };
  std::stable_sort(axis.tried.begin(), axis.tried.end(), [&](size_t a, size_t b) { return rate(a) < rate(b); });
  const std::vector<Tried> numbers = numbers_of(comparison, axis);
  axis.choice = choose_rate(numbers);
  axis.settled =
      axis.tried.size() >= asked && std::ranges::all_of(numbers, &Tried::ended) && !rate_beyond(numbers, asked);
  axis.choice.at_edge = axis.choice.at_edge && axis.settled;
  return axis;
}

// AdamW's --lr; Muon's own, and at the best of these also --lr. Nothing where there is no choice.
std::vector<RateAxis> axes_of(const Comparison& comparison, const Arm& arm, const std::vector<size_t>& tries) {
  if (tries.empty()) return {};
  const std::vector<double>& asked = rates_asked(comparison, arm.optimizer);
  if (!has_muon(arm.optimizer)) return {axis_of(comparison, false, asked.size(), tries)};
  const double lr = middle_rate(comparison.rates);
  std::vector<size_t> first, second;
  for (const size_t i : tries)
    if (comparison.runs[i].plan.lr == lr) first.push_back(i);
  std::vector<RateAxis> axes = {axis_of(comparison, true, asked.size(), first)};
  if (!axes[0].settled || std::isnan(axes[0].choice.best)) return axes;
  for (const size_t i : tries)
    if (comparison.runs[i].plan.muon.lr == axes[0].choice.best) second.push_back(i);
  axes.push_back(axis_of(comparison, false, 3, second));  // the middle, half of it and twice
  return axes;
}

// What the arm would be trained at, by what is known so far.
void choose_rates(const Comparison& comparison, Arm& arm) {
  const ComparedRun& any = comparison.runs[arm.seeds[0]];
  const auto of_axis = [&](bool muon, double otherwise) {
    for (const RateAxis& axis : arm.axes)
      if (axis.muon == muon) return axis.choice.rate;
    return otherwise;
  };
  const bool muon = has_muon(arm.optimizer);
  arm.lr = of_axis(false, arm.axes.empty() ? any.plan.lr : middle_rate(comparison.rates));
  arm.muon_lr = muon ? of_axis(true, any.plan.muon.lr) : NAN;
  if (std::isnan(arm.lr) || (muon && std::isnan(arm.muon_lr))) arm.lr = arm.muon_lr = NAN;
  const size_t axes = arm.axes.empty() ? 0 : muon && std::isfinite(arm.axes[0].choice.best) ? 2 : 1;
  arm.settled = arm.axes.size() == axes && std::ranges::all_of(arm.axes, &RateAxis::settled);
  arm.at_edge = arm.settled && std::ranges::any_of(arm.axes, [](const RateAxis& axis) { return axis.choice.at_edge; });
}

Arm arm_of(const Comparison& comparison, const ComparedRun& like) {
  Arm arm{arm_name(comparison, like), like.choice.text, like.plan.optimizer};
  if (comparison.rules.every_rate) arm.rate = rate_of(like);
  std::vector<size_t> tries;
  for (size_t i = 0; i < comparison.runs.size(); ++i) {
    const ComparedRun& run = comparison.runs[i];
    if (is_of(run, arm)) (chooses(comparison, run) ? tries : run.more ? arm.more : arm.seeds).push_back(i);
  }
  arm.axes = axes_of(comparison, arm, tries);
  for (const RateAxis& axis : arm.axes)
    for (const size_t i : axis.tried) add_new(arm.sweep, i);
  choose_rates(comparison, arm);
  return arm;
}

// Of an arm that had a choice a seed may diverge, of another one none.
bool works(const Comparison& comparison, const Arm& arm, bool tuned) {
  const auto lost = std::ranges::count_if(arm.seeds, [&](size_t i) { return diverged(comparison.runs[i]); });
  return std::isfinite(arm.lr) && (lost == 0 || (tuned && lost < std::ssize(arm.seeds)));
}

// Arms go around the machines, one by one, those that follow another with it. The baseline's first seeds are trained
// on all of them, by which it can be told whether losses of two machines may stand in one table.
void share_out(const Comparison& comparison, const std::vector<std::string>& leaders, std::vector<Arm>& arms) {
  const MachinePart& part = comparison.part;
  for (Arm& arm : arms)
    arm.mine = comparison.only.empty() || comparison.only.contains(arm.arch) || arm.arch == arms[0].arch;
  if (part.of == 1) return;
  int64_t next = 0;
  std::map<std::string, int64_t> part_of;  // by architecture
  for (size_t i = 0; i < arms.size(); ++i) {
    Arm& arm = arms[i];
    const std::string& leader = leaders[i].empty() ? arm.arch : leaders[i];
    if (!part_of.contains(leader)) part_of[leader] = next++ % part.of;
    arm.mine = arm.mine && part_of[leader] + 1 == part.number;
    if (arm.arch != arms[0].arch || arm.mine) continue;
    arm.mine = true;
    if (arm.seeds.size() > seeds_of_check) arm.seeds.resize(seeds_of_check);
  }
}

// --- what has turned out to be needed ----------------------------------------------------------------------------

// The next rates of an axis, once all before it are tried.
std::vector<double> next_rates(const Comparison& comparison, const Arm& arm, const RateAxis& axis) {
  const std::vector<Tried> numbers = numbers_of(comparison, axis);
  if (&axis != &arm.axes[0] && numbers.size() < axis.asked) {
    const double lr = middle_rate(comparison.rates);
    std::vector<double> rates = {readable_rate(lr / 2), readable_rate(2 * lr)};
    std::erase_if(rates, [&](double rate) { return std::ranges::find(numbers, rate, &Tried::rate) != numbers.end(); });
    return rates;
  }
  const std::optional<double> beyond = rate_beyond(numbers, axis.asked);
  return beyond ? std::vector{*beyond} : std::vector<double>();
}

bool add_rates(Comparison& comparison) {
  bool any = false;
  for (const Arm& arm : arms_of(comparison))
    for (const RateAxis& axis : arm.axes)
      for (const double rate : next_rates(comparison, arm, axis)) {
        const double lr = axis.muon ? middle_rate(comparison.rates) : rate,
                     muon_lr = axis.muon ? rate : arm.axes[0].choice.best;
        add_try(comparison, arm, lr, muon_lr), any = true;
      }
  return any;
}

// The reported seeds that have not begun get the rates of their arm.
bool give_rates(Comparison& comparison) {
  bool any = false;
  for (const Arm& arm : arms_of(comparison)) {
    if (!arm.has_rate()) continue;
    for (const std::vector<size_t>* seeds : {&arm.seeds, &arm.more})
      for (const size_t i : *seeds) {
        ComparedRun& run = comparison.runs[i];
        if (run.rated || run.state != RunState::waiting) continue;
        set_rates(comparison, run.plan, arm.lr, arm.muon_lr);
        run.rated = true, run.directory.clear(), any = true;
      }
  }
  return any;
}

double mean_loss(const Comparison& comparison, const Arm& arm) { return spread_over(comparison, arm, test_loss).mean; }

// Those of Rules::more_seeds, with this optimizer, once all arms have ended with the seeds that were asked for.
std::vector<const Arm*> arms_with_more(const Comparison& comparison, const std::vector<Arm>& arms,
                                       const std::string& optimizer) {
  std::vector<const Arm*> judged;
  std::vector<ArmLosses> losses;
  for (const Arm& arm : arms) {
    if (arm.optimizer != optimizer) continue;
    const auto open = [&](size_t i) { return is_unfinished(comparison.runs[i]); };
    if (!arm.settled || (arm.has_rate() && std::ranges::any_of(arm.seeds, open))) return {};
    if (first_architecture(arms, arm) != nullptr) judged.push_back(&arm), losses.push_back(losses_of(comparison, arm));
  }
  std::vector<const Arm*> out;
  for (const size_t place : unsteady(losses)) out.push_back(judged[place]);
  std::erase_if(judged, [&](const Arm* arm) {
    const ComparedRun& run = comparison.runs[arm->seeds[0]];
    return !run.choice.leader.empty() || losses_of(comparison, *arm).diverged() ||
           !std::isfinite(mean_loss(comparison, *arm));
  });
  std::ranges::stable_sort(judged, {}, [&](const Arm* arm) { return mean_loss(comparison, *arm); });
  if (judged.size() > best_arms) judged.resize(best_arms);
  for (const Arm* arm : judged) add_new(out, arm);
  return out;
}

bool add_more_seeds(Comparison& comparison) {
  if (!comparison.rules.more_seeds) return false;
  const std::vector<Arm> arms = arms_of(comparison);
  bool any = false;
  for (const std::string& optimizer : optimizers_of(comparison))
    for (const Arm* arm : arms_with_more(comparison, arms, optimizer)) {
      if (!arm->more.empty()) continue;
      const ComparedRun& like = comparison.runs[arm->seeds[0]];
      uint64_t last = 0;
      for (const size_t i : arm->seeds) last = std::max(last, comparison.runs[i].plan.seed);
      std::vector<uint64_t> seeds;
      for (uint64_t k = 1; k <= more_seeds; ++k) seeds.push_back(last + k);
      const size_t before = comparison.runs.size();
      add_seeds(comparison, {like.choice, like.plan, plan_training(like.plan)}, seeds);
      for (size_t i = before; i < comparison.runs.size(); ++i) comparison.runs[i].more = true;
      any = true;
    }
  return any;
}

// Those of the arm that a run is of, in a list.
const Arm* find_arm(const std::vector<Arm>& arms, const std::string& arch, const std::string& optimizer) {
  const auto found =
      std::ranges::find_if(arms, [&](const Arm& arm) { return arm.arch == arch && arm.optimizer == optimizer; });
  return found == arms.end() ? nullptr : &*found;
}

}  // namespace

double middle_rate(const std::vector<double>& rates) { return rates.empty() ? NAN : rates[(rates.size() - 1) / 2]; }

bool is_of(const ComparedRun& run, const Arm& arm) {
  return run.choice.text == arm.arch && run.plan.optimizer == arm.optimizer &&
         (std::isnan(arm.rate) || rate_of(run) == arm.rate);
}

std::string rate_name(const ComparedRun& run) {
  return (has_muon(run.plan.optimizer) ? " muon-lr " : " lr ") + lr_text(rate_of(run));
}

double rate_of(const ComparedRun& run) { return has_muon(run.plan.optimizer) ? run.plan.muon.lr : run.plan.lr; }

const std::vector<double>& rates_asked(const Comparison& comparison, const std::string& optimizer) {
  return has_muon(optimizer) ? comparison.muon_rates : comparison.rates;
}

bool chooses(const Comparison& comparison, const ComparedRun& run) {
  return comparison.choosing_seed && run.plan.seed == *comparison.choosing_seed;
}

std::vector<uint64_t> seeds_of(const Comparison& comparison) {
  std::vector<uint64_t> seeds;
  for (const ComparedRun& run : comparison.runs) {
    const bool own = !comparison.rules.backbone_seeds.empty() && run.choice.text == comparison.runs[0].choice.text;
    if (!chooses(comparison, run) && run.choice.again == 0 && !run.more && !own) add_new(seeds, run.plan.seed);
  }
  return seeds.empty() ? comparison.rules.backbone_seeds : seeds;
}

std::vector<std::string> optimizers_of(const Comparison& comparison) {
  std::vector<std::string> names;
  for (const ComparedRun& run : comparison.runs) add_new(names, run.plan.optimizer);
  return names;
}

std::string arm_name(const Comparison& comparison, const ComparedRun& run) {
  return run.choice.text + (optimizers_of(comparison).size() > 1 ? " " + run.plan.optimizer : "") +
         (comparison.rules.every_rate ? rate_name(run) : "");
}

std::vector<Arm> arms_of(const Comparison& comparison) {
  std::vector<Arm> arms;
  std::vector<std::string> leaders;
  for (const ComparedRun& run : comparison.runs) {
    if (std::ranges::any_of(arms, [&](const Arm& arm) { return is_of(run, arm); })) continue;
    arms.push_back(arm_of(comparison, run));
    leaders.push_back(run.choice.leader);
  }
  for (size_t i = 0; i < arms.size(); ++i) {
    const bool follows = !leaders[i].empty() && !comparison.rules.every_rate;
    const Arm* leader = follows ? find_arm(arms, leaders[i], arms[i].optimizer) : nullptr;
    if (leader != nullptr)
      arms[i].settled = leader->settled, arms[i].lr = leader->lr, arms[i].muon_lr = leader->muon_lr;
    arms[i].works = works(comparison, arms[i], !(leader != nullptr ? leader : &arms[i])->axes.empty());
  }
  share_out(comparison, leaders, arms);
  return arms;
}

void add_try(Comparison& comparison, const Arm& arm, double lr, double muon_lr) {
  const ComparedRun& like = comparison.runs[arm.seeds[0]];
  ComparedRun run{like.choice, like.plan, plan_training(like.plan)};
  run.plan.seed = *comparison.choosing_seed;
  run.plan.data.test_part = "first_half";
  run.found = true;
  set_rates(comparison, run.plan, lr, muon_lr);
  comparison.runs.push_back(run);
}

void add_seeds(Comparison& comparison, const ComparedRun& like, const std::vector<uint64_t>& seeds) {
  const bool rated = !comparison.choosing_seed;
  for (const uint64_t seed : seeds) {
    ComparedRun run = like;
    run.plan.seed = seed + seeds_between_twins * run.choice.again;
    if (comparison.choosing_seed) run.plan.data.test_part = "second_half";
    run.rated = rated;
    run.directory.clear();
    comparison.runs.push_back(run);
  }
}

void add_arm(Comparison& comparison, const ComparedRun& like, const std::vector<uint64_t>& seeds) {
  const bool first = comparison.runs.empty() || comparison.runs[0].choice.text == like.choice.text;
  const std::vector<uint64_t>& own = comparison.rules.backbone_seeds;
  ComparedRun run = like;
  run.plan.lr = middle_rate(comparison.rates);
  const std::vector<double>& rates = rates_asked(comparison, like.plan.optimizer);
  const auto at_rate = [&](double rate) {
    ComparedRun other = run;
    set_rates(comparison, other.plan, has_muon(like.plan.optimizer) ? run.plan.lr : rate, rate);
    return other;
  };
  if (comparison.rules.every_rate) {
    for (const double rate : rates) add_seeds(comparison, at_rate(rate), first && !own.empty() ? own : seeds);
    return;
  }
  add_seeds(comparison, run, first && !own.empty() ? own : seeds);
  if (!comparison.choosing_seed || !like.choice.leader.empty() || rates.size() < 2) return;
  for (const double rate : rates) {
    ComparedRun attempt = at_rate(rate);
    attempt.plan.seed = *comparison.choosing_seed;
    attempt.plan.data.test_part = "first_half";
    comparison.runs.push_back(attempt);
  }
}

void name_directories(Comparison& comparison) {
  const std::vector<Arm> arms = arms_of(comparison);
  const bool one_each = comparison.runs.size() == arms.size() && !comparison.rules.every_rate,
             several = optimizers_of(comparison).size() > 1;
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
  if (!arm.has_rate()) return out;
  for (const std::vector<size_t>* seeds : {&arm.seeds, &arm.more}) out.insert(out.end(), seeds->begin(), seeds->end());
  return out;
}

bool extend(Comparison& comparison) {
  for (bool any = false;; any = true) {
    name_directories(comparison);
    // All that is known, before more is asked for: a record may come before those that say which rate it belongs to.
    if (!take_others(comparison) && !add_rates(comparison) && !give_rates(comparison) && !add_more_seeds(comparison))
      return any;
  }
}

const Arm* first_architecture(const std::vector<Arm>& arms, const Arm& arm) {
  const Arm& first = arms[0];
  if (arm.arch == first.arch || arm.arch.ends_with("@frozen")) return nullptr;
  return find_arm(arms, first.arch, arm.optimizer);
}

const Arm* first_optimizer(const std::vector<Arm>& arms, const Arm& arm) {
  for (const Arm& other : arms)
    if (other.arch == arm.arch) return other.optimizer == arm.optimizer ? nullptr : &other;
  return nullptr;
}

std::string rates_text(const std::string& optimizer, double lr, double muon_lr) {
  return lr_text(lr) + (has_muon(optimizer) ? ", muon " + lr_text(muon_lr) : "");
}

std::string rates_text(const Arm& arm) {
  if (std::isnan(arm.lr)) return "-";
  return rates_text(arm.optimizer, arm.lr, arm.muon_lr) + (arm.settled ? "" : ", so far");
}

std::string basins_text(const Arm& arm) {
  std::string out;
  for (const RateAxis& axis : arm.axes)
    if (axis.settled && std::isfinite(axis.choice.basin))
      out += (out.empty() ? "" : ", ") + std::string(axis.muon ? "muon x" : "x") +
             format_number("%.2g", axis.choice.basin);
  return out.empty() ? "-" : out;
}

const Arm* control_of(const std::vector<Arm>& arms, const Arm& arm) {
  return find_arm(arms, arm.arch + "@frozen", arm.optimizer);
}

}  // namespace crossply
