// results.json of a comparison, and the records of its runs. comparison_resume.cpp reads them back.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/io/file.h"
#include "engine/io/json.h"
#include "train/lab/comparison.h"
#include "train/run/environment.h"

namespace crossply {
namespace {

using nlohmann::json;

void add_rates(json& to, const ComparedRun& run) {
  to["lr"] = run.plan.lr;
  if (has_muon(run.plan.optimizer)) to["muon_lr"] = run.plan.muon.lr;
}

// Of the family that the arm is in; empty where it is the baseline of one.
json difference_of(const std::vector<Family>& families, const Arm& arm) {
  const auto is_in = [&](const Family& one) {
    return std::ranges::any_of(one.arms, [&](const Arm* other) { return other->name == arm.name; });
  };
  const auto family = std::ranges::find_if(families, is_in);
  const Verdict verdict = family == families.end() ? Verdict() : family->of(arm);
  return {{"difference_from", family == families.end() ? json() : json(family->baseline->name)},
          {"difference_mean", number_or_null(verdict.difference)},
          {"difference_error", number_or_null(verdict.error)},
          {"difference_interval", number_or_null(verdict.interval)},
          {"larger_than_spread", verdict.tested ? json(verdict.found) : json()}};
}

// Of AdamW's lr, and of Muon's two rates.
json basins_of(const Arm& arm) {
  json out = json::object();
  for (const RateAxis& axis : arm.axes) out[axis.muon ? "muon_lr" : "lr"] = number_or_null(axis.choice.basin);
  return out;
}

json json_of(const Comparison& comparison, const Arm& arm, const std::vector<Family>& architectures,
             const std::vector<Family>& controls, const std::vector<Family>& optimizers) {
  json rates = json::array();
  for (const size_t i : arm.sweep) {
    rates.push_back({{"test_loss", number_or_null(test_loss(comparison.runs[i]).value)}});
    add_rates(rates.back(), comparison.runs[i]);
  }
  const Spread loss = spread_over(comparison, arm, test_loss);
  json out = {{"name", arm.name},
              {"arch", arm.arch},
              {"optimizer", arm.optimizer},
              {"lr_settled", arm.settled},
              {"lr_at_edge", arm.at_edge},
              {"rates", rates},
              {"lr", number_or_null(arm.lr)},
              {"basins", basins_of(arm)},
              {"seeds_done", loss.n},
              {"seeds_lost", std::ranges::count_if(arm.seeds, [&](size_t i) { return diverged(comparison.runs[i]); })},
              {"test_loss_mean", number_or_null(loss.mean)},
              {"test_loss_sd", number_or_null(loss.sd)}};
  if (has_muon(arm.optimizer)) out["muon_lr"] = number_or_null(arm.muon_lr);
  if (!arm.more.empty()) out["further_test_loss_mean"] = number_or_null(further_spread(comparison, arm).mean);
  out.update(difference_of(architectures, arm));
  if (const json other = difference_of(controls, arm); !other["difference_from"].is_null())
    out["control_difference"] = other;
  if (const json other = difference_of(optimizers, arm); !other["difference_from"].is_null())
    out["optimizer_difference"] = other;
  return out;
}

// Every evaluation of a run, so that results.json alone can be drawn.
json evaluations_of(const RunCurves& curves) {
  return {{"step", curves.test_step},  {"test_loss", curves.test_loss},     {"answer_step", curves.answer_step},
          {"answers", curves.answers}, {"steps_valid", curves.steps_valid}, {"hard_answers", curves.hard_answers}};
}

constexpr const char* about =
    "paths are relative to this file; flops_per_token: forward and backward, of the tape; ..._6n: 6 "
    "non_embedding_parameters; ..._palm: the same and 12 L H D T; flops: of all tokens so far; mfu: flops_per_second "
    "over the peak by the data sheet; memory_bytes: of the model and its activations, without the program's own; "
    "relative: to the baseline, which ran at another time; answers and "
    "steps_valid: shares of 1; test_loss_sequences: how many test sequences test_loss is of, and flags/eval_rule "
    "which (spread: sequence floor((i + 0.5) N / n) of N; spread_then_all: all after the last step; first, and where "
    "there is none: the first ones); ..._step: when the number was measured; null: unknown; "
    "architectures: with each optimizer, at the rates that were chosen, once lr_settled, by the losses of "
    "choosing_seed "
    "on the first half of the test set (flags/test_part), while the others are tested on the second; basins: by what a "
    "rate may be multiplied or divided for 0.01 nats; found: the rate was not asked for; difference: of mean "
    "test losses from that of difference_from, its standard error, and half of an interval by which all that are "
    "compared with it raise a false alarm once in twenty (Dunnett's test); others: runs that the last call did not "
    "compare; "
    "training_seconds: without pauses and tests, of a machine that other runs may have shared; environment: of the "
    "run's "
    "last part";

}  // namespace

json environment_of(const Comparison& comparison, const ComparedRun& run) {
  if (!run.environment.empty()) return known_json(run.environment);
  return recorded_environment(comparison.out + "/" + run_directory(run) + "/environment.jsonl");
}

std::vector<double> recorded_losses(const json& record) {
  std::vector<double> out;
  for (const json& loss : record.value("first_losses", json::array()))
    if (loss.is_number()) out.push_back(loss.get<double>());
  return out;
}

std::vector<double> first_losses(const ComparedRun& run) {
  const std::vector<double>& losses = run.result.curves.loss;
  return losses.empty() ? run.first_losses
                        : std::vector(losses.begin(), losses.begin() + std::min(compared_steps, losses.size()));
}

json to_json(const Comparison& comparison, const ComparedRun& run) {
  const TrainResult& r = run.result;
  const std::string dir = run_directory(run);
  const size_t place = static_cast<size_t>(&run - comparison.runs.data());
  const int64_t steps_done = is_done(run) ? run.plan.steps : steps_of(run);
  const int64_t tokens_per_step = run.plan.batch * run.plan.accumulate * run.plan.data.seq_len;
  const double rate = r.tokens_per_second * r.accounting.flops_per_token;
  json out = {{"name", run.choice.text},
              {"arch", run.choice.arch},
              {"options", run.choice.options},
              {"directory", dir},
              {"metrics", run.state == RunState::waiting ? json() : json(dir + "/metrics.jsonl")},
              {"state", name_of(run.state)},
              {"exit_code", run.state == RunState::waiting ? json() : json(static_cast<int>(r.code))},
              {"error", run.error},
              {"optimizer", run.plan.optimizer},
              {"lr", run.plan.lr},
              {"muon_lr", has_muon(run.plan.optimizer) ? json(run.plan.muon.lr) : json()},
              {"seed", run.plan.seed},
              {"found", run.found},
              {"more", run.more},
              {"pairs", run.pairs.empty() ? json() : known_json(run.pairs)},
              {"flags", all_settings(run.plan)},
              {"steps_done", steps_done},
              {"tokens", steps_done * tokens_per_step},
              {"scored_tokens", r.scored_tokens < 0 ? json() : json(r.scored_tokens)},
              {"epochs", number_or_null(r.epochs)},
              {"flops", static_cast<double>(steps_done * tokens_per_step) * r.accounting.flops_per_token},
              {"flops_per_second", rate > 0 ? json(rate) : json()},
              {"mfu", rate > 0 && r.peak > 0 ? json(rate / r.peak) : json()},
              {"peak_flops_per_second", r.peak > 0 ? json(r.peak) : json()},
              {"memory_bytes", r.memory},
              {"relative_memory", relative_memory(comparison, run)},
              {"tokens_per_second", r.tokens_per_second > 0 ? json(r.tokens_per_second) : json()},
              {"tokens_per_step", tokens_per_step},
              {"training_seconds", r.curves.seconds.empty() ? json() : number_or_null(r.curves.seconds.back())},
              {"runs_side_by_side", run.side_by_side},
              {"test_loss_sequences",
               comparison.test_size > 0 ? json(sequences_tested(run.plan, test_size_of(comparison, run), is_done(run)))
                                        : json()},
              {"relative_time", number_or_null(relative_time(comparison, {place}))}};
  out.update(to_json(r.accounting));
  const auto put = [&](const std::string& key, const Measured& number, const std::string& step_key) {
    const bool known = std::isfinite(number.value);
    out[key] = known ? json(number.value) : json();
    out[step_key] = known ? json(number.step) : json();
  };
  put("train_loss", train_loss(run), "train_loss_step");
  put("test_loss", test_loss(run), "test_loss_step");
  put("answers", answers(run), "answers_step");
  put("steps_valid", steps_valid(run), "answers_step");
  return out;
}

// As to_json, with all that else its directory's files have.
static json whole_json(const Comparison& comparison, const ComparedRun& run) {
  json out = to_json(comparison, run);
  out["evaluations"] = evaluations_of(run.result.curves);
  out["environment"] = environment_of(comparison, run);
  out["first_losses"] = first_losses(run);
  return out;
}

std::string write_records(const Comparison& comparison) {
  const std::string directory = comparison.out + "/records";
  return io_error_of([&] {
    make_directories(directory);
    for (const ComparedRun& run : comparison.runs) {
      const std::string path = record_path(comparison, run);
      if (is_unfinished(run) || (path_exists(path) && !run.tried)) continue;
      json record = {{"format", "crossply run"}, {"version", 1}, {"data_digest", comparison.data_digest}};
      record.update(whole_json(comparison, run));
      for (const char* of_others : {"relative_memory", "relative_time", "metrics"}) record.erase(of_others);
      json& flags = record["flags"];
      for (const std::string& files : data_settings)  // elsewhere they have other paths
        if (!comparison.data_digest.empty() && flags.contains(files) && flags[files].is_string())
          flags[files] = short_name(flags[files].get<std::string>());
      const std::string text = json_text_mended(record, 2) + "\n";
      if (!file_holds(path, text)) write_file_atomically(path, text);  // it may be of fewer steps
    }
  });
}

std::string results_json(const Comparison& comparison) {
  json runs = json::array(), arms = json::array(), others = json::array();
  const std::vector<Arm> all_arms = arms_of(comparison);
  const std::vector<Family> architectures = families_of_architectures(comparison, all_arms),
                            controls = families_of_controls(comparison, all_arms),
                            of_optimizers = families_of_optimizers(comparison, all_arms);
  std::set<size_t> listed;  // a run that is not needed, or not yet known to be, only if it was begun
  for (const Arm& arm : all_arms) {
    arms.push_back(json_of(comparison, arm, architectures, controls, of_optimizers));
    listed.insert(arm.sweep.begin(), arm.sweep.end());
    if (arm.sweep.empty()) listed.insert(arm.seeds[0]);
  }
  for (size_t i = 0; i < comparison.runs.size(); ++i) {
    const ComparedRun& run = comparison.runs[i];
    if (run.state == RunState::waiting && !listed.contains(i)) continue;
    runs.push_back(whole_json(comparison, run));
  }
  for (const std::string& other : comparison.others) others.push_back(known_json(other));
  const double chance = chance_of(comparison.data);  // of answers
  const int64_t tested = test_size_of(comparison, comparison.runs[all_arms[0].seeds[0]]);
  const json all = {{"format", "crossply comparison"},
                    {"version", 1},
                    {"about", about},
                    {"data", comparison.data},
                    {"data_digest", comparison.data_digest.empty() ? json() : json(comparison.data_digest)},
                    {"baseline", comparison.runs[0].choice.text},
                    {"optimizers", optimizers_of(comparison)},
                    {"rates", comparison.rates},
                    {"muon_rates", comparison.muon_rates},
                    {"choosing_seed", comparison.choosing_seed ? json(*comparison.choosing_seed) : json()},
                    {"seeds", seeds_of(comparison)},
                    {"backbone_seeds", comparison.rules.backbone_seeds},
                    {"hold_decay", comparison.rules.hold_decay},
                    {"every_rate", comparison.rules.every_rate},
                    {"more_seeds", comparison.rules.more_seeds},
                    {"pairs", comparison.rules.pairs},
                    {"weight_decay", comparison.weight_decay},
                    {"test_sequences", tested > 0 ? json(tested) : json()},
                    {"chance", number_or_null(chance)},
                    {"architectures", arms},
                    {"runs", runs},
                    {"others", others}};
  return json_text_mended(all, 2) + "\n";
}

}  // namespace crossply
