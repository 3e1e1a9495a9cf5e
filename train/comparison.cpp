#include "train/comparison.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/format.h"
#include "engine/device.h"
#include "engine/file.h"
#include "models/checkpoint.h"
#include "models/json_file.h"
#include "train/curve.h"

namespace crossply {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const char* name_of(RunState state) {
  switch (state) {
    case RunState::waiting: return "not started";
    case RunState::done: return "done";
    case RunState::stopped: return "stopped";
    case RunState::failed: return "failed";
  }
  return "";
}

bool is_done(const ComparedRun& run) { return run.state == RunState::done; }

// Of the run, relative to the yardstick; NaN where one of them is not done or has no rate.
double relative_time(const Comparison& comparison, const ComparedRun& run) {
  const ComparedRun& yardstick = comparison.runs[0];
  if (!is_done(yardstick) || !is_done(run)) return NAN;
  if (yardstick.result.tokens_per_second <= 0 || run.result.tokens_per_second <= 0) return NAN;
  return yardstick.result.tokens_per_second / run.result.tokens_per_second;
}
double relative_memory(const Comparison& comparison, const ComparedRun& run) {
  return static_cast<double>(run.result.memory) / static_cast<double>(comparison.runs[0].result.memory);
}

int64_t steps_of(const ComparedRun& run) {
  const std::vector<double>& steps = run.result.curves.step;
  return steps.empty() ? 0 : static_cast<int64_t>(steps.back());
}

// A number and the step that it is of; NaN where there is none.
struct Measured {
  double value = NAN;
  int64_t step = 0;
};

Measured last_of(const std::vector<double>& values, const std::vector<double>& steps) {
  return values.empty() ? Measured() : Measured{values.back(), static_cast<int64_t>(steps.back())};
}

Measured train_loss(const ComparedRun& run) {
  if (is_done(run)) return {run.result.train_loss, run.options.steps};
  return {final_loss(run.result.curves), steps_of(run)};
}
Measured test_loss(const ComparedRun& run) {
  const RunCurves& curves = run.result.curves;
  return is_done(run) ? Measured{run.result.test_loss, run.options.steps} : last_of(curves.test_loss, curves.test_step);
}
// Those of a task: shares of 1.
Measured task_share(const ComparedRun& run, double at_the_end, const std::vector<double>& before) {
  if (is_done(run)) return {at_the_end < 0 ? NAN : at_the_end, run.options.steps};
  return last_of(before, run.result.curves.answer_step);
}
Measured answers(const ComparedRun& run) { return task_share(run, run.result.answers, run.result.curves.answers); }
Measured steps_valid(const ComparedRun& run) {
  return task_share(run, run.result.steps_valid, run.result.curves.steps_valid);
}

// Whole below `exact_below`, then with four digits: 66,496 and 124.4M.
std::string short_count(int64_t count, int64_t exact_below) {
  if (count < exact_below) return format_count(count);
  const double value = static_cast<double>(count);
  const double unit = value >= 1e9 ? 1e9 : value >= 1e6 ? 1e6 : 1e3;
  return format_number("%.4g", value / unit) + (unit == 1e9 ? "G" : unit == 1e6 ? "M" : "k");
}

// Three digits behind the point, four where there are no others: 2.413, 0.0741.
std::string loss_text(double loss) {
  return format_number(std::abs(loss) >= 1000 ? "%.4g" : std::abs(loss) < 0.1 ? "%.4f" : "%.3f", loss);
}

std::string percent_text(double share) { return format_number("%.1f %%", 100 * share); }

std::string rate_text(const ComparedRun& run, int64_t exact_below) {
  const double rate = run.result.tokens_per_second;
  return rate > 0 ? short_count(static_cast<int64_t>(rate), exact_below) : "-";
}

std::string ratio_text(double ratio) { return std::isfinite(ratio) ? format_number("%.2fx", ratio) : "-"; }

// With its step, where that is not the run's last: "0.640 @1800".
template <class Text>
std::string measured_text(const ComparedRun& run, const Measured& number, Text&& text) {
  if (!std::isfinite(number.value)) return "-";
  return text(number.value) + (is_done(run) ? "" : str(" @", number.step));
}

bool is_task(const Comparison& comparison) {
  return std::any_of(comparison.runs.begin(), comparison.runs.end(),
                     [](const ComparedRun& run) { return std::isfinite(answers(run).value); });
}

struct Column {
  std::string name;
  int rank;  // of those that do not fit, the highest are left out first
  std::vector<std::string> cells;
};

std::vector<Column> columns_of(const Comparison& comparison) {
  std::vector<Column> columns;
  auto add = [&](const std::string& name, int rank, auto&& text) {
    columns.push_back({name, rank, {}});
    for (const ComparedRun& run : comparison.runs) columns.back().cells.push_back(text(run));
  };
  auto last = [](auto&& number, auto&& text) {
    return [=](const ComparedRun& run) { return measured_text(run, number(run), text); };
  };
  add("architecture", 0, [](const ComparedRun& run) { return run.choice.text; });
  add("parameters", 2, [](const ComparedRun& run) { return short_count(run.result.parameters, 10'000'000); });
  add("FLOP/token", 8, [](const ComparedRun& run) { return format_number("%.4g", run.result.flops_per_token); });
  add("tokens/s", 4, [](const ComparedRun& run) { return rate_text(run, 1'000'000); });
  add("memory", 5, [&](const ComparedRun& run) { return ratio_text(relative_memory(comparison, run)); });
  add("train loss", 7, last(train_loss, loss_text));
  add("test loss", 1, last(test_loss, loss_text));
  if (!is_task(comparison)) return columns;
  add("answers", 3, last(answers, percent_text));
  add("valid", 6, last(steps_valid, percent_text));
  return columns;
}

size_t width_of(const std::vector<Column>& columns) {
  size_t width = 0;
  for (const Column& column : columns) {
    size_t widest = column.name.size();
    for (const std::string& cell : column.cells) widest = std::max(widest, cell.size());
    width += widest + (width > 0 ? 2 : 0);
  }
  return width;
}

std::string table_of(const std::vector<Column>& columns, size_t rows) {
  std::vector<std::vector<std::string>> table(rows + 1);
  for (const Column& column : columns) {
    table[0].push_back(column.name);
    for (size_t i = 0; i < rows; ++i) table[i + 1].push_back(column.cells[i]);
  }
  return format_table(table);
}

// What a reader must know of a run that is not done; "" of one that is.
std::string remark(const ComparedRun& run) {
  if (is_done(run)) return "";
  if (run.state == RunState::waiting) return "not started";
  const std::string at = str(" after step ", steps_of(run), " of ", run.options.steps);
  return name_of(run.state) + at + (run.error.empty() ? "" : ": " + run.error);
}

std::vector<std::string> markdown_cells(const Comparison& comparison, const ComparedRun& run) {
  const TrainResult& r = run.result;
  const auto four_digits = [](double loss) { return format_number("%.4f", loss); };
  const double time = relative_time(comparison, run);
  return {run.choice.text,
          format_count(r.parameters),
          format_number("%.6g", r.flops_per_token),
          rate_text(run, std::numeric_limits<int64_t>::max()),
          std::isfinite(time) ? format_number("~%.1fx", time) : "-",
          format_bytes(static_cast<double>(r.memory)),
          ratio_text(relative_memory(comparison, run)),
          measured_text(run, train_loss(run), four_digits),
          measured_text(run, test_loss(run), four_digits),
          measured_text(run, answers(run), percent_text),
          measured_text(run, steps_valid(run), percent_text),
          is_done(run) ? "done" : remark(run)};
}

json json_of(const Comparison& comparison, const ComparedRun& run) {
  const TrainResult& r = run.result;
  const std::string dir = run.choice.file_name();
  json out = {{"name", run.choice.text},
              {"arch", run.choice.arch},
              {"options", run.choice.options},
              {"directory", dir},
              {"metrics", run.state == RunState::waiting ? json() : json(dir + "/metrics.jsonl")},
              {"state", name_of(run.state)},
              {"exit_code", run.state == RunState::waiting ? json() : json(static_cast<int>(r.code))},
              {"error", run.error},
              {"seed", run.options.seed},
              {"flags", all_settings(run.options)},
              {"steps_done", steps_of(run)},
              {"parameters", r.parameters},
              {"flops_per_token", r.flops_per_token},
              {"memory_bytes", r.memory},
              {"relative_memory", relative_memory(comparison, run)},
              {"tokens_per_second", r.tokens_per_second > 0 ? json(r.tokens_per_second) : json()},
              {"relative_time", relative_time(comparison, run)}};
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

// results.json in the directory of a comparison: an object with an array of runs, which have names. Null if there is
// none.
json read_results(const std::string& path) {
  if (!path_exists(path)) return {};
  json all = read_json(path);
  if (!all.is_object() || !all.contains("runs") || !all["runs"].is_array() || all["runs"].empty())
    fail(Exit::bad_data, path, ": \"runs\" is missing");
  for (const json& run : all["runs"])
    if (!run.is_object() || !run.contains("name") || !run["name"].is_string())
      fail(Exit::bad_data, path, ": a run has no \"name\"");
  return all;
}

Exit exit_code_of(const json& run, const std::string& path) {
  const json code = run.value("exit_code", json());
  for (const Exit known : {Exit::done, Exit::usage, Exit::bad_data, Exit::no_input, Exit::internal, Exit::device,
                           Exit::io, Exit::stopped, Exit::not_finite})
    if (code == static_cast<int>(known)) return known;
  fail(Exit::bad_data, path, ": \"exit_code\" cannot be ", code.dump());
}

// The inverse of json_of, for what only the run could say.
void take_up(ComparedRun& run, const json& before, const std::string& out) {
  const auto number = [&](const char* key, double otherwise) {
    const auto found = before.find(key);
    return found != before.end() && found->is_number() ? found->get<double>() : otherwise;
  };
  for (const RunState state : {RunState::done, RunState::stopped, RunState::failed})
    if (before.value("state", json()) == name_of(state)) run.state = state;
  if (run.state == RunState::waiting) return;
  TrainResult& r = run.result;
  r.code = exit_code_of(before, out + "/results.json");
  r.tokens_per_second = number("tokens_per_second", 0);
  if (const json memory = before.value("memory_bytes", json()); memory.is_number_unsigned()) r.memory = memory;
  r.train_loss = number("train_loss", NAN);
  r.test_loss = number("test_loss", NAN);
  r.answers = number("answers", -1);
  r.steps_valid = number("steps_valid", -1);
  r.curves = read_curves(out + "/" + run.choice.file_name() + "/metrics.jsonl");
  if (before.contains("error") && before["error"].is_string()) run.error = before["error"];
  if (is_done(run) && number("steps_done", 0) < static_cast<double>(run.options.steps)) run.state = RunState::stopped;
}

// What the test numbers are of, and how much of a difference between them may be chance.
std::string notes_on_tests(const Comparison& comparison) {
  const TrainOptions& o = comparison.runs[0].options;
  const auto part = [&](int64_t samples, const std::string& what) {
    if (comparison.test_size == 0) return str("at most ", format_count(samples), " ", what);
    if (samples >= comparison.test_size) return str("all ", format_count(comparison.test_size), " ", what);
    return str("the first ", format_count(samples), " of ", format_count(comparison.test_size), " ", what);
  };
  const int64_t sequences = o.eval_samples > 0 ? o.eval_samples : comparison.test_size;
  std::string out =
      "test loss: over " + (sequences > 0 ? part(sequences, "test sequences") : "all test sequences") + ".\n";
  if (is_task(comparison)) {
    const int64_t prompts =
        comparison.test_size > 0 ? std::min(o.answer_samples, comparison.test_size) : o.answer_samples;
    double error = 0;  // two standard errors
    for (const ComparedRun& run : comparison.runs)
      if (const double p = answers(run).value; std::isfinite(p))
        error = std::max(error, 2 * std::sqrt(p * (1 - p) / static_cast<double>(prompts)));
    const double chance = chance_of(comparison.data);
    out += "answers: to " + part(o.answer_samples, "test prompts");
    if (std::isfinite(chance)) out += "; guessing gets " + percent_text(chance);
    if (error > 0) out += ";\nsampling error (two standard errors) " + format_number("up to %.1f points", 100 * error);
    out += ".\n";
  }
  return out + "All runs have one seed: another may order close architectures otherwise.\n";
}

void draw(const Comparison& comparison) {
  Panel losses{"training loss", "test loss", {}}, answers{"correct answers to test prompts", "", {}, true};
  for (const ComparedRun& run : comparison.runs) {
    if (run.state == RunState::waiting) continue;
    const RunCurves& c = run.result.curves;
    const std::string name = run.choice.text + (is_done(run) ? "" : str(" (", name_of(run.state), ")"));
    const bool failed = run.state == RunState::failed;
    losses.curves.push_back({name, c.step, c.loss, c.test_step, c.test_loss, failed});
    answers.curves.push_back({name, c.answer_step, c.answers, {}, {}, failed});
  }
  std::vector<Panel> panels = {losses};
  const auto has_points = [](const Curve& curve) { return !curve.x.empty(); };
  if (std::any_of(answers.curves.begin(), answers.curves.end(), has_points)) panels.push_back(answers);
  write_curve_svg(comparison.out + "/compare.svg", "loss on " + comparison.data, "step", panels);
}

}  // namespace

std::string results_table(const Comparison& comparison, size_t width) {
  std::vector<Column> columns = columns_of(comparison);
  while (columns.size() > 2 && width_of(columns) > width) {
    columns.erase(std::max_element(columns.begin(), columns.end(),
                                   [](const Column& a, const Column& b) { return a.rank < b.rank; }));
  }
  std::string out = table_of(columns, comparison.runs.size());
  for (const ComparedRun& run : comparison.runs)
    if (!is_done(run)) out += run.choice.text + ": " + remark(run) + "\n";
  out += "memory: relative to " + comparison.runs[0].choice.text + ". All columns: results.md.\n" +
         "tokens/s: of runs one after the other, so only roughly comparable;\n" +
         "`make bench-architectures` measures in turn.\n";
  for (const auto& [name, meaning] :
       {std::pair{"train loss", "mean of the last fiftieth of the steps"},
        std::pair{"answers", "the final answer is correct"}, std::pair{"valid", "so is every generated step"}}) {
    const auto shown = [&, wanted = name](const Column& column) { return column.name == wanted; };
    if (std::any_of(columns.begin(), columns.end(), shown)) out += std::string(name) + ": " + meaning + ".\n";
  }
  return out + notes_on_tests(comparison);
}

std::string results_markdown(const Comparison& comparison) {
  const TrainOptions& o = comparison.runs[0].options;
  std::string out = "# " + format_markdown(comparison.data) + "\n\n" +
                    str(o.steps, " steps of ", o.batch * o.accumulate, " sequences of ", o.data.seq_len,
                        " tokens, seed ", o.seed, "; all settings: results.json.\n\n![loss](compare.svg)\n\n");
  out += format_markdown_row({"architecture", "parameters", "FLOP/token", "tokens/s", "time", "memory",
                              "relative memory", "train loss", "test loss", "answers", "steps valid", "state"});
  out += "|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const ComparedRun& run : comparison.runs) out += format_markdown_row(markdown_cells(comparison, run));
  return out + "\ntime and relative memory: against " + format_markdown(comparison.runs[0].choice.text) +
         ". tokens/s and time: the architectures ran one after the other, so whatever else the machine did is in them; "
         "`make bench-architectures` measures in turn. @N: after step N. FLOP/token: forward and backward. memory: of "
         "the model and its activations, without the program's own.\n"
         "train loss: mean of the last fiftieth of the steps. answers: the final answer is correct; steps valid: so is "
         "every generated step.\n\n" +
         notes_on_tests(comparison);
}

std::string results_json(const Comparison& comparison) {
  json runs = json::array();
  for (const ComparedRun& run : comparison.runs) runs.push_back(json_of(comparison, run));
  const double chance = chance_of(comparison.data);  // of answers
  const json all = {{"format", "crossply comparison"},
                    {"version", 1},
                    {"about",
                     "paths are relative to this file; flops_per_token: forward and backward; memory_bytes: "
                     "of the model and its activations, without the program's own; relative: to the "
                     "yardstick, which ran at another time; answers and steps_valid: shares of 1; ..._step: "
                     "when the number was measured; null: unknown"},
                    {"data", comparison.data},
                    {"yardstick", comparison.runs[0].choice.text},
                    {"test_sequences", comparison.test_size > 0 ? json(comparison.test_size) : json()},
                    {"chance", std::isfinite(chance) ? json(chance) : json()},
                    {"runs", runs}};
  return all.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

void write_results(const Comparison& comparison) {
  draw(comparison);
  write_file_atomically(comparison.out + "/results.md", results_markdown(comparison));
  write_file_atomically(comparison.out + "/results.json", results_json(comparison));
}

std::string parameter_warning(const Comparison& comparison) {
  const ComparedRun& yardstick = comparison.runs[0];
  std::string list;
  for (const ComparedRun& run : comparison.runs) {
    const double ratio = static_cast<double>(run.result.parameters) / static_cast<double>(yardstick.result.parameters);
    if (std::abs(ratio - 1) > 0.1)
      list += (list.empty() ? " " : ", ") + run.choice.text + format_number(" %+.0f %%", 100 * (ratio - 1));
  }
  return list.empty() ? "" : "warning: not as many parameters as " + yardstick.choice.text + ":" + list;
}

bool take_comparison_settings(const std::string& out, std::string& archs, TrainOptions& options) {
  const std::string path = out + "/results.json";
  const json old = read_results(path);
  if (old.is_null()) return false;
  archs.clear();
  for (const json& run : old["runs"]) archs += (archs.empty() ? "" : ",") + run["name"].get<std::string>();
  // A GPT-2 among LLaMAs does not have all their sizes.
  const json& runs = old["runs"];
  const auto llama = std::find_if(runs.begin(), runs.end(), [](const json& run) {
    return run.contains("flags") && run["flags"].contains("config") && run["flags"]["config"].contains("hidden_size");
  });
  take_settings((llama == runs.end() ? runs[0] : *llama).value("flags", json()), path + ": flags", options);
  options.config.arch = "llama";  // what the first one has of its own is in its name
  options.config.options.clear();
  return true;
}

void take_up(Comparison& comparison) {
  const std::string& out = comparison.out;
  for (const char* file : {"/compare.svg", "/results.md", "/results.json"}) remove_leftovers_of(out + file);
  const json old = read_results(out + "/results.json");
  if (old.is_null()) {
    const bool has_run = std::any_of(comparison.runs.begin(), comparison.runs.end(), [&](const ComparedRun& run) {
      return path_exists(out + "/" + run.choice.file_name());
    });
    std::error_code ignored;
    if (!has_run && path_exists(out) && !fs::is_empty(out, ignored))
      fail(Exit::usage, "--resume: ", out, " holds files, but no comparison; choose another --out");
    return;
  }
  for (const json& before : old["runs"]) {
    const std::string name = before["name"];
    const auto run = std::find_if(comparison.runs.begin(), comparison.runs.end(),
                                  [&](const ComparedRun& candidate) { return candidate.choice.text == name; });
    if (run == comparison.runs.end())
      fail(Exit::usage, "--resume: ", out, " also compares ", name,
           ", whose results would be lost; give --arch with all of them, or none");
    const std::string where = out + "/" + run->choice.file_name();
    const json flags = before.value("flags", json());
    refuse_other_settings(flags, run->options, where);
    refuse_other_config(parse_config(flags.value("config", json()), out + "/results.json: config"), run->options.config,
                        where);
    take_up(*run, before, out);
  }
}

int64_t unfinished_runs(const Comparison& comparison, size_t first) {
  return std::count_if(comparison.runs.begin() + static_cast<std::ptrdiff_t>(first), comparison.runs.end(),
                       [](const ComparedRun& run) { return !is_done(run); });
}

}  // namespace crossply
