#include "train/lab/inheritune.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/curve.h"
#include "cli/format.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "eval/loaded_model.h"
#include "models/disk/checkpoint.h"
#include "train/run/run_curves.h"
#include "train/settings/setting_io.h"
#include "train/step/trainer.h"

namespace crossply {
namespace {

using nlohmann::json;

std::string nats(double loss) { return std::isfinite(loss) ? format_number("%.4f", loss) : "-"; }

// Calls visit for each flag that a resumed run must keep (train/settings/setting_io.h).
template <class Any, class Visit>
void each_of_recipe(Any& recipe, Visit&& visit) {
  visit("reference", recipe.reference);
  visit("start", recipe.start, 1);
  visit("grow", recipe.grow, 1);
  visit("mode", recipe.mode, grow_modes);
  visit("inherit_positions", recipe.positions);
  visit("inherit_final_norm", recipe.final_norm);
  visit("tolerance", recipe.tolerance, 0, 1000);
}

json to_json(const Recipe& recipe) {
  json out;
  each_of_recipe(recipe, PutSetting{out});
  out["rounds"] = recipe.rounds;
  return out;
}

json json_of_round(const Inheritance& all, size_t i) {
  const Round& round = all.rounds[i];
  const auto within = [&](const std::string& dir) { return dir.substr(all.plan.out.size() + 1); };
  const std::string dir = within(all.run_dir(i));
  return {{"round", i + 1},
          {"blocks", round.blocks},
          {"parameters", round.parameters},
          {"steps", all.plan.steps},
          {"initial", within(all.initial_dir(i))},
          {"directory", dir},
          {"metrics", dir + "/metrics.jsonl"},
          {"initial_loss", number_or_null(round.initial_loss)},
          {"final_loss", number_or_null(round.final_loss)},
          {"difference", number_or_null(round.final_loss - all.reference_loss)},
          {"matches", round.is_done() ? json(all.matches(round)) : json()}};
}

std::string state_text(const Inheritance& all) {
  json rounds = json::array();
  for (size_t i = 0; i < all.rounds.size(); ++i) rounds.push_back(json_of_round(all, i));
  const json out = {{"format", "crossply inheritune"},
                    {"version", 1},
                    {"about",
                     "losses in nats per token, over all of the validation set, in order; paths of rounds are relative "
                     "to this file; null: not known yet"},
                    {"recipe", to_json(all.recipe)},
                    {"reference_blocks", all.depth()},
                    {"reference_parameters", all.reference_parameters},
                    {"reference_loss", number_or_null(all.reference_loss)},
                    {"reference_digest", all.reference_digest},
                    {"validation_sequences", all.sequences},
                    {"validation_tokens", all.tokens},
                    {"data_digest", all.data_digest},
                    {"verdict", all.verdict()},
                    {"flags", all_settings(all.plan)},
                    {"rounds", rounds}};
  return json_text_mended(out, 2) + "\n";
}

std::vector<std::vector<std::string>> cells_of(const Inheritance& all) {
  std::vector<std::vector<std::string>> table = {
      {"round", "blocks", "parameters", "steps", "at step 0", "at end", "reference", "difference"}};
  for (size_t i = 0; i < all.rounds.size(); ++i) {
    const Round& round = all.rounds[i];
    const double difference = round.final_loss - all.reference_loss;
    table.push_back({std::to_string(i + 1), std::to_string(round.blocks), format_count(round.parameters),
                     format_count(all.plan.steps), nats(round.initial_loss), nats(round.final_loss),
                     nats(all.reference_loss), std::isfinite(difference) ? format_number("%+.4f", difference) : "-"});
  }
  return table;
}

std::string notes_on_losses(const Inheritance& all) {
  return str("losses: over all ", format_count(all.sequences), " validation sequences, ", format_count(all.tokens),
             " tokens, in order.\nreference: ", format_count(all.depth()), " blocks, ",
             format_count(all.reference_parameters), " parameters.\n");
}

std::string markdown(const Inheritance& all) {
  const TrainPlan& plan = all.plan;
  std::string out = str("# Inheritune from ", all.depth(), " blocks\n\n", plan.steps, " steps a round of ",
                        plan.batch * plan.accumulate, " sequences of ", plan.data.seq_len, " tokens, seed ", plan.seed,
                        "; all settings: inheritune.json.\n\n![loss](inheritune.svg)\n\n");
  const auto table = cells_of(all);
  for (const auto& row : table) {
    out += format_markdown_row(row);
    if (&row == &table[0]) out += "|---|---|---|---|---|---|---|---|\n";
  }
  return out + "\n" + notes_on_losses(all) + "\n" + all.verdict() + "\n";
}

// The curve of a round: its tests, with the losses over all of the validation set at both ends.
Curve curve_of(const Inheritance& all, size_t i) {
  const Round& round = all.rounds[i];
  const RunCurves run = read_curves(all.run_dir(i) + "/metrics.jsonl");
  const auto steps = static_cast<double>(all.plan.steps);
  Curve curve{str("round ", i + 1, ", ", round.blocks, " blocks"), {0}, {round.initial_loss}};
  for (size_t j = 0; j < run.test_step.size(); ++j) {
    if (round.is_done() && run.test_step[j] == steps) continue;
    curve.x.push_back(run.test_step[j]);
    curve.y.push_back(run.test_loss[j]);
  }
  if (round.is_done()) curve.x.push_back(steps), curve.y.push_back(round.final_loss);
  return curve;
}

void draw_rounds(const Inheritance& all) {
  const std::string part = all.plan.eval_samples > 0 && all.plan.eval_samples < all.sequences
                               ? str(" (between the ends: of ", format_count(all.plan.eval_samples), " sequences)")
                               : "";
  Panel panel{"validation loss" + part, "", {}};
  panel.curves.push_back({str("reference, ", all.depth(), " blocks"),
                          {0, static_cast<double>(all.plan.steps)},
                          {all.reference_loss, all.reference_loss}});
  for (size_t i = 0; i < all.rounds.size(); ++i) panel.curves.push_back(curve_of(all, i));
  write_curve_svg(all.plan.out + "/inheritune.svg", "Inheritune on " + all.plan.data.spec, "step of the round",
                  {panel});
}

std::string state_path(const std::string& out) { return out + "/inheritune.json"; }

// As the newest checkpoint of any round records it, "" where that does not; none where there is no checkpoint.
std::optional<std::string> recorded_teacher(const Inheritance& all) {
  for (size_t i = all.rounds.size(); i-- > 0;) {
    if (!path_exists(all.run_dir(i))) continue;
    const std::string newest = newest_valid_checkpoint(all.run_dir(i));
    if (newest.empty()) continue;
    const json digest = read_json(newest + "/train_state.json").value("teacher_digest", json());
    return digest.is_string() ? digest.get<std::string>() : "";
  }
  return std::nullopt;
}

// A reference or a teacher under another name must have the weights that it had.
std::set<std::string> moved_models(const Inheritance& all, const Recipe& recipe, const Settings& before,
                                   const std::string& path) {
  std::set<std::string> moved = data_settings;  // whose digest take_up() compares
  moved.insert("init");                         // the reference, here
  const TrainPlan& plan = all.plan;
  if (all.recipe.reference != recipe.reference && !all.reference_digest.empty() &&
      digest_of(LoadedModel(all.reference_dir, "cpu", false).params) != all.reference_digest)
    fail(Exit::bad_data, "--resume: --reference ", all.recipe.reference, " holds other weights than ", recipe.reference,
         " did when its loss was measured for ", path, "; name the directory that has them");
  if (plan.teacher == before.teacher || plan.teacher.empty() || before.teacher.empty()) return moved;
  const std::optional<std::string> digest = recorded_teacher(all);
  const bool trained = !all.rounds.empty() && all.rounds[0].is_done();
  if (digest ? digest_of_teacher(plan) == *digest : !trained) moved.insert("teacher");
  return moved;
}

void refuse_other_recipe(const Inheritance& all, const Recipe& recipe, const Settings& before,
                         const std::string& path) {
  const json now = to_json(all.recipe), was = to_json(recipe);
  for (const auto& [key, value] : now.items())
    if (key != "rounds" && key != "reference" && was[key] != value)
      fail(Exit::usage, "--resume: ", path, " has ", key, " ", json_text(was[key]), ", the flags say ",
           json_text(value), "; resume with the flags it was started with");
  if (before.steps != all.plan.steps)
    fail(Exit::usage, "--resume: ", path, " has --steps ", before.steps, " a round, the flags say ", all.plan.steps);
  refuse_other_config(before.config, all.plan.config, path);
}

// The next round of inheritune.json.
Round parse_round(const json& line, const Inheritance& all, const std::string& path) {
  if (!line.is_object()) fail(Exit::bad_data, path, ": a round is ", json_text(line));
  Round round;
  read(line, "blocks", round.blocks, path);
  read(line, "parameters", round.parameters, path);
  read(line, "initial_loss", round.initial_loss, path);
  read(line, "final_loss", round.final_loss, path);
  const int64_t expected = all.recipe.start + std::ssize(all.rounds) * all.recipe.grow;
  if (round.blocks != expected || expected > all.depth())
    fail(Exit::bad_data, path, ": round ", all.rounds.size() + 1, " has ", round.blocks, " blocks, not ", expected,
         ", of ", all.depth());
  return round;
}

}  // namespace

std::string Inheritance::run_dir(size_t i) const {
  return str(plan.out, "/round_", i + 1, "_blocks_", rounds[i].blocks);
}

std::string Inheritance::initial_dir(size_t i) const {
  return str(plan.out, "/initial_", i + 1, "_blocks_", rounds[i].blocks);
}

int64_t Inheritance::next_blocks() const {
  const int64_t done = std::ssize(rounds), next = recipe.start + done * recipe.grow;
  return next > depth() || (recipe.rounds > 0 && done >= recipe.rounds) ? 0 : next;
}

std::string Inheritance::verdict() const {
  if (rounds.empty() || !rounds.back().is_done()) return "";
  const Round& last = rounds.back();
  const std::string losses = str(nats(last.final_loss), matches(last) ? " <= " : " > ", nats(reference_loss),
                                 recipe.tolerance > 0 ? str(" + ", recipe.tolerance) : "");
  const std::string of = str("round ", rounds.size(), ", ", last.blocks, " of ", depth(), " blocks");
  if (matches(last)) return of + ", matches the reference: " + losses;
  const std::string short_of = of + ", does not match the reference: " + losses;
  if (last.blocks + recipe.grow > depth())
    return short_of + str("; ", last.blocks + recipe.grow, " blocks would be more than it has");
  if (recipe.rounds > 0 && std::ssize(rounds) >= recipe.rounds)
    return short_of + str("; --rounds ", recipe.rounds, " ends it");
  return short_of + str("; the next has ", last.blocks + recipe.grow);
}

std::string rounds_table(const Inheritance& all) {
  std::string verdict = all.verdict();
  if (const size_t at = verdict.find("; "); at != std::string::npos) verdict[at + 1] = '\n';
  return format_table(cells_of(all)) + notes_on_losses(all) + verdict + "\n";
}

void write_state(const Inheritance& all) { write_file_atomically(state_path(all.plan.out), state_text(all)); }

std::string write_rounds(const Inheritance& all) {
  const auto state = [&] { write_state(all); };
  if (all.rounds.empty()) return io_error_of(state);
  return first_io_error_of(
      state, [&] { write_file_atomically(all.plan.out + "/inheritune.md", markdown(all)); }, [&] { draw_rounds(all); });
}

bool take_recipe(const std::string& out, Recipe& recipe, Settings& settings) {
  const std::string path = state_path(out);
  if (out.empty() || !path_exists(path)) return false;
  const json old = read_json(path), saved = old.value("recipe", json());
  if (!saved.is_object()) fail(Exit::bad_data, path, ": \"recipe\" is missing");
  const TakeSetting take{saved, path, /*complete=*/true};
  each_of_recipe(recipe, take);
  take("rounds", recipe.rounds);
  take_settings(old.value("flags", json()), path + ": flags", settings);
  return true;
}

bool take_up(Inheritance& all) {
  const TrainPlan& plan = all.plan;
  const std::string path = state_path(plan.out);
  if (!path_exists(path)) return false;
  Recipe recipe;
  Settings before;
  take_recipe(plan.out, recipe, before);
  refuse_other_recipe(all, recipe, before, path);
  const json old = read_json(path);
  std::string digest;
  read(old, "data_digest", digest, path);
  if (digest != all.data_digest)
    fail(Exit::bad_data, "--resume: ", plan.data.spec, " is not the data that the run in ", plan.out,
         " was started with; its size or contents changed");
  read(old, "reference_loss", all.reference_loss, path);
  read(old, "reference_digest", all.reference_digest, path);
  read(old, "validation_sequences", all.sequences, path);
  read(old, "validation_tokens", all.tokens, path);
  const json rounds = old.value("rounds", json());
  if (!rounds.is_array()) fail(Exit::bad_data, path, ": \"rounds\" is missing");
  for (const json& line : rounds) all.rounds.push_back(parse_round(line, all, path));
  refuse_other_settings(trajectory(before), plan, path, moved_models(all, recipe, before, path));
  return true;
}

}  // namespace crossply
