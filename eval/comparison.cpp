#include "eval/comparison.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "engine/device.h"
#include "engine/file.h"
#include "models/json_file.h"
#include "train/curve.h"
#include "train/progress.h"

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

bool is_task(const Comparison& comparison) {
  return std::any_of(comparison.runs.begin(), comparison.runs.end(),
                     [](const ComparedRun& run) { return run.result.answers >= 0; });
}

// Of the run, relative to the yardstick; NaN where one of them is not done.
double relative_time(const Comparison& comparison, const ComparedRun& run) {
  const ComparedRun& yardstick = comparison.runs[0];
  if (!is_done(yardstick) || !is_done(run)) return NAN;
  return yardstick.result.tokens_per_second / run.result.tokens_per_second;
}
double relative_memory(const Comparison& comparison, const ComparedRun& run) {
  return static_cast<double>(run.result.memory) / static_cast<double>(comparison.runs[0].result.memory);
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

std::string ratio_text(double ratio) { return std::isfinite(ratio) ? format_number("%.2fx", ratio) : "-"; }

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
  // "-" where the run is not done.
  auto measured = [](auto&& text) {
    return [text](const ComparedRun& run) { return is_done(run) ? text(run.result) : std::string("-"); };
  };
  auto percent = [](double share) { return format_number("%.1f %%", 100 * share); };
  add("architecture", 0, [](const ComparedRun& run) { return run.choice.text; });
  add("parameters", 2, [](const ComparedRun& run) { return short_count(run.result.parameters, 10'000'000); });
  add("FLOP/token", 9, [](const ComparedRun& run) { return format_number("%.4g", run.result.flops_per_token); });
  add("tokens/s", 5, measured([](const TrainResult& r) {
        return short_count(static_cast<int64_t>(r.tokens_per_second), 1'000'000);
      }));
  add("time", 4, [&](const ComparedRun& run) { return ratio_text(relative_time(comparison, run)); });
  add("memory", 6, [&](const ComparedRun& run) { return ratio_text(relative_memory(comparison, run)); });
  add("train loss", 8, measured([](const TrainResult& r) { return loss_text(r.train_loss); }));
  add("test loss", 1, measured([](const TrainResult& r) { return loss_text(r.test_loss); }));
  if (!is_task(comparison)) return columns;
  add("answers", 3, measured([&](const TrainResult& r) { return percent(r.answers); }));
  add("valid", 7, measured([&](const TrainResult& r) { return percent(r.steps_valid); }));
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

int64_t steps_of(const ComparedRun& run) {
  const std::vector<double>& steps = run.result.curves.step;
  return steps.empty() ? 0 : static_cast<int64_t>(steps.back());
}

// What a reader must know of a run that is not done; "" of one that is.
std::string remark(const ComparedRun& run) {
  if (is_done(run)) return "";
  if (run.state == RunState::waiting) return "not started";
  const std::string at = str(" after step ", steps_of(run), " of ", run.options.steps);
  return name_of(run.state) + at + (run.error.empty() ? "" : ": " + run.error);
}

// A cell of a Markdown table.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c == '\n' || c == '\r' ? ' ' : c;
  }
  return out;
}

std::string markdown_row(const std::vector<std::string>& cells) {
  std::string out = "|";
  for (const std::string& text : cells) out += " " + cell(text) + " |";
  return out + "\n";
}

std::string percent_or_dash(double share) { return share < 0 ? "-" : format_number("%.1f %%", 100 * share); }

std::vector<std::string> markdown_cells(const Comparison& comparison, const ComparedRun& run) {
  const TrainResult& r = run.result;
  const bool done = is_done(run);
  return {run.choice.text,
          format_count(r.parameters),
          format_number("%.6g", r.flops_per_token),
          done ? format_count(static_cast<int64_t>(r.tokens_per_second)) : "-",
          ratio_text(relative_time(comparison, run)),
          format_bytes(static_cast<double>(r.memory)),
          ratio_text(relative_memory(comparison, run)),
          done ? format_number("%.4f", r.train_loss) : "-",
          done ? format_number("%.4f", r.test_loss) : "-",
          done ? percent_or_dash(r.answers) : "-",
          done ? percent_or_dash(r.steps_valid) : "-",
          done ? "done" : remark(run)};
}

json json_of(const Comparison& comparison, const ComparedRun& run) {
  const TrainResult& r = run.result;
  auto measured = [&](double value, bool known) { return is_done(run) && known ? json(value) : json(); };
  const std::string dir = run.choice.file_name();
  return {{"name", run.choice.text},
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
          {"tokens_per_second", measured(r.tokens_per_second, true)},
          {"relative_time", relative_time(comparison, run)},
          {"train_loss", measured(r.train_loss, true)},
          {"test_loss", measured(r.test_loss, true)},
          {"answers", measured(r.answers, r.answers >= 0)},
          {"steps_valid", measured(r.steps_valid, r.steps_valid >= 0)}};
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
  r.code = static_cast<Exit>(static_cast<int>(number("exit_code", 0)));
  r.tokens_per_second = number("tokens_per_second", 0);
  r.memory = static_cast<size_t>(number("memory_bytes", static_cast<double>(r.memory)));
  r.train_loss = number("train_loss", 0);
  r.test_loss = number("test_loss", 0);
  r.answers = number("answers", -1);
  r.steps_valid = number("steps_valid", -1);
  r.curves = read_curves(out + "/" + run.choice.file_name() + "/metrics.jsonl");
  if (before.contains("error") && before["error"].is_string()) run.error = before["error"];
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
  out += "time, memory: relative to " + comparison.runs[0].choice.text + ", which ran at another time;\n" +
         "`make bench-architectures` measures in turn. All columns: results.md.\n";
  for (const auto& [name, meaning] : {std::pair{"train loss", "mean of the last fiftieth of the steps"},
                                      std::pair{"answers", "the final answer is correct"},
                                      std::pair{"valid", "so is every generated step"}}) {
    const auto shown = [&, wanted = name](const Column& column) { return column.name == wanted; };
    if (std::any_of(columns.begin(), columns.end(), shown)) out += std::string(name) + ": " + meaning + ".\n";
  }
  return out;
}

std::string results_markdown(const Comparison& comparison) {
  const TrainOptions& o = comparison.runs[0].options;
  std::string out = "# " + cell(comparison.data) + "\n\n" +
                    str(o.steps, " steps of ", o.batch * o.accumulate, " sequences of ", o.data.seq_len,
                        " tokens, seed ", o.seed, "; all settings: results.json.\n\n![loss](compare.svg)\n\n");
  out += markdown_row({"architecture", "parameters", "FLOP/token", "tokens/s", "time", "memory", "relative memory",
                       "train loss", "test loss", "answers", "steps valid", "state"});
  out += "|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const ComparedRun& run : comparison.runs) out += markdown_row(markdown_cells(comparison, run));
  return out + "\ntime and relative memory: against " + cell(comparison.runs[0].choice.text) +
         ", which ran at another time. FLOP/token: forward and backward. memory: of the model and its activations, "
         "without the program's own.\n"
         "train loss: mean of the last fiftieth of the steps. answers: the final answer is correct; steps valid: so is "
         "every generated step.\n";
}

std::string results_json(const Comparison& comparison) {
  json runs = json::array();
  for (const ComparedRun& run : comparison.runs) runs.push_back(json_of(comparison, run));
  const json all = {{"format", "crossply comparison"},
                    {"version", 1},
                    {"about", "paths are relative to this file; flops_per_token: forward and backward; memory_bytes: "
                              "of the model and its activations, without the program's own; relative: to the "
                              "yardstick; answers and steps_valid: shares of 1; null: unknown"},
                    {"data", comparison.data},
                    {"yardstick", comparison.runs[0].choice.text},
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
    if (std::abs(ratio - 1) > 0.1) list += (list.empty() ? " " : ", ") + run.choice.text +
                                           format_number(" %+.0f %%", 100 * (ratio - 1));
  }
  return list.empty() ? "" : "warning: not as many parameters as " + yardstick.choice.text + ":" + list;
}

void take_up(Comparison& comparison) {
  const std::string path = comparison.out + "/results.json";
  if (!path_exists(path)) {
    const bool has_run = std::any_of(comparison.runs.begin(), comparison.runs.end(), [&](const ComparedRun& run) {
      return path_exists(comparison.out + "/" + run.choice.file_name());
    });
    std::error_code ignored;
    if (!has_run && path_exists(comparison.out) && !fs::is_empty(comparison.out, ignored))
      fail(Exit::usage, "--resume: ", comparison.out, " holds files, but no comparison; choose another --out");
    return;
  }
  const json old = read_json(path);
  if (!old.contains("runs") || !old["runs"].is_array()) fail(Exit::bad_data, path, ": \"runs\" is missing");
  for (const json& before : old["runs"]) {
    if (!before.is_object() || !before.contains("name") || !before["name"].is_string())
      fail(Exit::bad_data, path, ": a run has no \"name\"");
    const std::string name = before["name"];
    const auto run = std::find_if(comparison.runs.begin(), comparison.runs.end(),
                                  [&](const ComparedRun& candidate) { return candidate.choice.text == name; });
    if (run == comparison.runs.end())
      fail(Exit::usage, "--resume: ", comparison.out, " also compares ", name,
           ", whose results would be lost; give --arch with all of them");
    take_up(*run, before, comparison.out);
  }
}

}  // namespace crossply
