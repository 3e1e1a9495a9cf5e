// sweep: trains the tables of a plan (sweep_plan.h), each a comparison of one size, and reports. A cell is an ordinary
// run directory; once it is done its record is enough. Several processes of one machine share the cells, several
// machines take a part each.
//
//   sweep run table.plan --out runs/table --dry-run     # cells, hours and memory
//   sweep run table.plan --out runs/table --jobs 2      # train, or go on
//   sweep time table.plan --out runs/table              # steps beside each other, on an idle machine
//   sweep report runs/table                             # the page, figures, CSV and JSON
//   sweep run table.plan --out runs/mine --arch mine --records runs/table     # add a row
#include <omp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "cli/format.h"
#include "cli/program.h"
#include "cli/stop.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "engine/split.h"
#include "ranks/launch.h"
#include "train/lab/experiment.h"
#include "train/lab/machines.h"
#include "train/lab/side_by_side.h"
#include "train/lab/sweep_report.h"
#include "train/run/environment.h"
#include "train/run/inputs.h"

using namespace crossply;

namespace {

using nlohmann::json;

struct Options {
  SweepCall call;
  std::string plan, part, to, program;
  std::vector<std::string> dirs;  // of report
  std::string table;              // names of tables, which alone count, with their budgets; "": all
  int64_t jobs = 0, rounds = 15;
  double hours = 0;
  bool dry = false;
};

std::vector<SweepTable> open_tables(const SweepPlan& plan, const Options& o) {
  const std::vector<std::string> names = o.table.empty() ? std::vector<std::string>() : split_commas(o.table);
  for (const std::string& name : names)
    if (std::ranges::find(plan.tables, name, &PlannedTable::name) == plan.tables.end())
      fail(Exit::usage, "--table: the plan has no table ", excerpt(name));
  std::vector<SweepTable> tables;
  for (const PlannedTable& planned : plan.tables) {
    const bool chosen = names.empty() || std::ranges::find(names, planned.name) != names.end() ||
                        std::ranges::find(names, planned.of) != names.end();
    const bool without_budgets = !o.call.arch.empty() && !planned.of.empty() && o.call.records.empty() &&
                                 !path_exists(o.call.out + "/" + planned.name);
    if (!chosen || without_budgets) continue;
    tables.push_back(open_table(planned, o.call));
  }
  return tables;
}

// --- how much there is to do -------------------------------------------------------------------------------------

// How many cells of a table at a time, where --jobs does not say it.
int64_t jobs_of(const SweepTable& table, int64_t asked) {
  return std::max<int64_t>(1, choose_jobs(table.comparison, asked).count);
}

struct Work {
  int64_t cells = 0, jobs = 1;     // left; at a time
  double seconds = 0, memory = 0;  // of all cells; of those at a time
};

// What is left of a table, by three measured steps of each arm, each with its share of the threads.
Work work_of(const SweepTable& table, int64_t asked) {
  Work work;
  work.jobs = jobs_of(table, asked);
  const auto side_by_side = static_cast<double>(work.jobs);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(static_cast<int>(std::max<int64_t>(1, threads / work.jobs)));
  for (const Arm& arm : arms_of(table.comparison)) {
    if (!arm.mine) continue;
    const std::vector<size_t> known = needed(arm);
    const auto ended = std::ranges::count_if(known, [&](size_t i) { return !is_unfinished(table.comparison.runs[i]); });
    const int64_t cells = std::max<int64_t>(0, static_cast<int64_t>(runs_planned(arm)) - ended);
    const ComparedRun& run = table.comparison.runs[arm.seeds[0]];
    work.memory = std::max(work.memory, side_by_side * run.result.planned_memory);
    if (cells == 0) continue;
    TrainPlan trial = run.plan;
    trial.resume = false;
    const auto [plan, data] = open_inputs(trial);
    work.cells += cells;
    work.seconds += seconds_of_run(plan, data) * static_cast<double>(cells) / side_by_side;
  }
  omp_set_num_threads(threads);
  return work;
}

// Prints the work of each table; returns all of it in seconds.
double print_work(const std::vector<SweepTable>& tables, int64_t asked) {
  std::vector<std::vector<std::string>> rows = {
      {"table", "arms", "cells left", "at a time", "steps", "time", "memory"}};
  double seconds = 0;
  int64_t cells = 0;
  for (const SweepTable& table : tables) {
    const Work work = work_of(table, asked);
    seconds += work.seconds, cells += work.cells;
    rows.push_back({table.planned.name, str(arms_of(table.comparison).size()), format_count(work.cells), str(work.jobs),
                    format_count(table.comparison.runs[0].plan.steps), format_seconds(work.seconds),
                    format_bytes(work.memory)});
  }
  const std::string all = str(format_count(cells), cells == 1 ? " cell: " : " cells: ", format_seconds(seconds),
                              " for the steps. Three steps of each arm were timed. Evaluations, minimal pairs and ",
                              "checkpoints come on top, up to three more learning rates for each arm whose best rate ",
                              "is at an edge, and what more-seeds adds.");
  std::printf("%s%s\n", printable(format_table(rows)).c_str(), wrap(all, 80, 0).c_str());
  return seconds;
}

// The plan with other numbers of steps: each line of steps, warmup, cooldown and eval-every times `factor`.
std::string scaled_plan(const std::string& text, double factor) {
  std::string out;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    const size_t equals = line.find('=');
    const std::string key = line.substr(0, line.find_first_of(" \t="));
    for (const char* scaled : {"steps", "warmup", "cooldown", "eval-every", "save-every"})
      if (const double old = equals == std::string::npos ? 0 : std::atof(line.c_str() + equals + 1);
          key == scaled && old > 0)  // 0 leaves the choice to the program
        line = str(key, " = ", std::max<long long>(1, std::llround(old * factor)));
    out += line + "\n";
    begin = end + 1;
  }
  return out;
}

// --- the commands ------------------------------------------------------------------------------------------------

// A plan may grow while it is trained: other tables, architectures and seeds beside those that are there.
void refuse_other_plan(const SweepPlan& plan, const Options& o) {
  if (!path_exists(plan_in(o.call.out))) return;
  for (const PlannedTable& table : read_sweep_plan(plan_in(o.call.out)).tables) {
    const auto now = std::ranges::find(plan.tables, table.name, &PlannedTable::name);
    if (now == plan.tables.end())
      fail(Exit::usage, o.call.out, " was begun with a table ", table.name, ", which ", o.plan,
           " does not have; put it back, or choose another --out");
    if (const std::string was = table.flag("--steps"), is = now->flag("--steps"); was != is)
      fail(Exit::usage, now->where, ": ", table.name, " was begun with steps = ", was, " in ", o.call.out, ", not ", is,
           "; put that back, or choose another --out");
  }
}

// The text of the plan that is trained: with --hours that of before, if there is one, or this one with as many steps as
// fit.
std::string choose_plan(const Options& o) {
  const std::string kept = plan_in(o.call.out);
  if (o.hours > 0 && path_exists(kept)) return read_file(kept, 1 << 20);
  const SweepPlan plan = read_sweep_plan(o.plan);
  const std::string text = read_file(o.plan, 1 << 20);
  if (o.hours == 0) return text;
  if (o.call.part.of > 1)
    fail(Exit::usage, "--hours with --part: each machine would choose other steps; use --hours on one machine, then ",
         "give its ", kept, " to all");
  for (const PlannedTable& table : plan.tables)
    if (table.flag("--steps").empty())
      fail(Exit::usage, table.where, ": --hours changes steps; write them into the plan");
  std::printf("with the plan's steps:\n");
  Options dry = o;
  dry.call.dry = true;
  const double seconds = print_work(open_tables(plan, dry), o.jobs);
  if (!(seconds > 0 && std::isfinite(seconds)))
    fail(Exit::usage, "--hours: the time of a step is not known; give the steps in the plan, without --hours");
  return scaled_plan(text, 3600 * o.hours / seconds);
}

bool waits_for_others(const SweepTable& table) {
  return std::ranges::any_of(table.comparison.runs, &ComparedRun::elsewhere);
}

// Trains what is left, table by table, and again while other processes have cells on which others may depend: these may
// end, or be killed. Returns the error of the last attempt to write a table's files.
std::string train_tables(std::vector<SweepTable>& tables, int64_t asked) {
  std::map<std::string, int64_t> jobs;  // by table
  std::string error;
  bool waiting = false;
  while (true) {
    for (SweepTable& table : tables) {
      if (runs_left(table.comparison) == 0 && !waits_for_others(table)) continue;
      const std::string& name = table.planned.name;
      if (!waiting)
        std::printf("== %s: %lld of %lld cells left\n", name.c_str(),
                    static_cast<long long>(runs_left(table.comparison)),
                    static_cast<long long>(runs_in_all(table.comparison)));
      if (!jobs.contains(name)) jobs[name] = jobs_of(table, asked);
      error = train_all(table.comparison, jobs[name]);
      if (stop_requested()) return error;
    }
    if (std::ranges::none_of(tables, waits_for_others)) return error;
    if (!waiting) std::printf("waiting for other processes, which train the cells that are left\n");
    std::fflush(stdout);
    waiting = true;
    for (int i = 0; i < 20 && !stop_requested(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (stop_requested()) return error;
  }
}

// As it was given, to be pasted.
std::string same_command(const Options& o) {
  const std::vector<std::string> words = command_line();
  std::string out = shell_command(o.program);
  for (auto word = std::ranges::find(words, "run"); word != words.end(); ++word) out += " " + shell_word(*word);
  return out;
}

// The exit code, and what failed.
Exit conclude(const std::vector<SweepTable>& tables, const Options& o, const std::string& unwritten) {
  int64_t left = 0;
  std::string failed;
  Exit code = Exit::done;
  for (const SweepTable& table : tables) {
    left += runs_left(table.comparison);
    for (const ComparedRun& run : table.comparison.runs) {
      if (run.state != RunState::failed || diverged(run)) continue;
      failed += "\n  " + table.planned.name + "/" + run_name(table.comparison, run) + ": " + run.error;
      code = run.result.code;
    }
  }
  if (stop_requested()) {
    std::printf("\nto continue: %s\n", same_command(o).c_str());
    return Exit::stopped;
  }
  if (!failed.empty()) fail(code, "cells failed; the same command tries them again:", failed);
  if (!unwritten.empty()) fail(Exit::io, unwritten, "; the cells are done and kept: mend that, then start again");
  return left > 0 ? Exit::stopped : Exit::done;
}

void read_part(Options& o) {
  if (o.part.empty()) return;
  const size_t slash = o.part.find('/');
  if (slash == std::string::npos) refuse_value("--part", "is K/N, as in 2/4");
  o.call.part = {read_integer("--part", o.part.substr(0, slash), 1, 1000),
                 read_integer("--part", o.part.substr(slash + 1), 1, 1000)};
  if (o.call.part.number > o.call.part.of) refuse_value("--part", "is K/N with K up to N");
}

std::string times_in(const std::string& out) { return out + "/times.json"; }

void take_times(std::vector<SweepTable>& tables, const std::string& out) {
  if (!path_exists(times_in(out))) return;
  const json all = read_json(times_in(out));
  for (SweepTable& table : tables) {
    if (!all.contains(table.planned.name) || !all[table.planned.name].is_object()) continue;
    for (const auto& [arm, time] : all[table.planned.name].items()) {
      const auto number = [&, &of = time](const char* key) {
        return of.is_object() && of.contains(key) && of[key].is_number() ? of[key].template get<double>() : NAN;
      };
      table.times[arm] = {number("seconds"), number("ratio"), number("low"), number("high")};
    }
  }
}

// What the tables say before they are trained, each line once.
void print_notes(const std::vector<SweepTable>& tables) {
  std::set<std::string> said;
  for (const SweepTable& table : tables)
    for (const std::string& note : table.notes)
      if (!note.empty() && said.insert(note).second)
        std::printf("%s\n", wrap(printable(table.planned.name + ": " + note), 80, 2).c_str());
}

Exit run_sweep(Options& o) {
  read_part(o);
  o.call.dry = o.dry;
  const std::string text = choose_plan(o);
  const SweepPlan plan = parse_sweep_plan(text, o.plan);
  refuse_other_plan(plan, o);
  std::vector<Descriptor> held;  // what is there already, before anything looks into it; and the rest, if all is well
  for (const PlannedTable& table : plan.tables)
    if (!o.dry && path_exists(o.call.out + "/" + table.name)) held.push_back(hold_table(o.call.out, table));
  std::vector<SweepTable> tables = open_tables(plan, o);
  if (!o.dry) {
    for (const SweepTable& table : tables) held.push_back(hold_table(o.call.out, table.planned));
    if (!file_holds(plan_in(o.call.out), text)) write_file_atomically(plan_in(o.call.out), text);
  }
  print_notes(tables);
  for (const SweepTable& table : tables)
    if (!o.dry && runs_left(table.comparison) > 0)
      for (const std::string& note : check_origins(table)) std::printf("%s\n", wrap(printable(note), 80, 2).c_str());
  if (o.dry || !o.call.arch.empty()) print_work(tables, o.jobs);
  if (o.dry) return Exit::done;
  for (const SweepTable& table : tables) check_device(table.comparison);
  catch_stop_signals();
  const std::string unwritten = train_tables(tables, o.jobs);
  take_times(tables, o.call.out);
  const std::vector<ReportTable> report = report_of(tables);
  write_sweep_report(report, o.call.out, {origins_of(tables), ""});
  std::printf("%s", printable(sweep_summary(report)).c_str());
  for (const ReportTable& of : report)
    for (const std::string& arch : of.table->comparison.only)
      if (const std::string place = place_of(of, arch); !place.empty())
        std::printf("\n%s\n", wrap(printable(place), 80, 0).c_str());
  std::printf("\nreport:   %s/report.md, results.csv, results.json\n", printable(o.call.out).c_str());
  return conclude(tables, o, unwritten);
}

// What is timed of a table: with one optimizer an arm of each architecture, the first one first.
std::vector<Arm> timed_arms(const SweepTable& table, const std::string& optimizer) {
  std::vector<Arm> out;
  for (const Arm& arm : arms_of(table.comparison))
    if (arm.optimizer == optimizer && arm.mine && table.comparison.runs[arm.seeds[0]].choice.again == 0)
      out.push_back(arm);
  return out;
}

// Adds the times of a table's arms with one optimizer to `all`, and returns them as rows of a table.
std::vector<std::vector<std::string>> time_arms(const SweepTable& table, const std::string& optimizer, int64_t rounds,
                                                json& all, bool& noisy) {
  const std::vector<Arm> arms = timed_arms(table, optimizer);
  std::vector<TrainPlan> plans;
  for (const Arm& arm : arms) {
    plans.push_back(table.comparison.runs[arm.seeds[0]].plan);
    plans.back().resume = false, plans.back().out.clear();
  }
  std::vector<std::vector<std::string>> rows;
  const std::vector<StepTime> times = time_steps(plans, rounds);
  for (size_t i = 0; i < times.size(); ++i) {
    const StepTime& t = times[i];
    all[arms[i].name] = {{"seconds", t.seconds}, {"ratio", t.ratio}, {"low", t.low}, {"high", t.high}};
    rows.push_back({arms[i].name, format_number("%.1f", 1e3 * t.seconds), format_number("%.3fx", t.ratio),
                    format_number("%.3f", t.low) + format_number(" to %.3f", t.high)});
    noisy |= t.high - t.low > 0.1 * t.ratio;
  }
  return rows;
}

Exit time_sweep(const Options& o) {
  const SweepPlan plan = read_sweep_plan(path_exists(plan_in(o.call.out)) ? plan_in(o.call.out) : o.plan);
  Options dry = o;
  dry.call.dry = true;
  json all = path_exists(times_in(o.call.out)) ? read_json(times_in(o.call.out)) : json::object();
  bool noisy = false;
  for (const SweepTable& table : open_tables(plan, dry)) {
    if (!table.planned.of.empty()) continue;
    std::vector<std::vector<std::string>> rows = {{table.planned.name, "ms a step", "time", "quartiles"}};
    for (const std::string& optimizer : optimizers_of(table.comparison))
      for (std::vector<std::string>& row : time_arms(table, optimizer, o.rounds, all[table.planned.name], noisy))
        rows.push_back(std::move(row));
    std::printf("%s\n", printable(format_table(rows)).c_str());
  }
  if (noisy) std::printf("note: some quartiles are far apart: use an idle machine, or more --rounds\n");
  make_directories(o.call.out);
  write_file_atomically(times_in(o.call.out), all.dump(2) + "\n");
  std::printf("times: %s\n", printable(times_in(o.call.out)).c_str());
  return Exit::done;
}

// Records of architectures that the plan does not have are not in a report: says so.
std::string unknown_rows(const std::vector<SweepTable>& tables) {
  std::set<std::string> names;
  for (const SweepTable& table : tables)
    for (const std::string& other : table.comparison.others) {
      const std::string name = known_json(other)["name"];
      if (std::ranges::none_of(table.comparison.runs, [&](const ComparedRun& run) { return run.choice.text == name; }))
        names.insert(name);
    }
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ",") + name;
  return list.empty()
             ? ""
             : "* There are records of architectures that the plan does not have; --arch " + list + " adds them.\n";
}

Exit report_sweep(Options& o) {
  const std::string first = o.dirs[0], out = o.to.empty() ? first : o.to;
  for (const std::string& dir : o.dirs)
    if (!path_exists(plan_in(dir))) fail(Exit::no_input, dir, " is no sweep: it has no sweep.plan");
  o.call.out = first, o.call.dry = o.call.report = true;
  std::vector<SweepTable> tables = open_tables(read_sweep_plan(plan_in(first)), o);
  const std::string notes = merge_sweeps(tables, first, {o.dirs.begin() + 1, o.dirs.end()}) + unknown_rows(tables);
  take_times(tables, first);
  make_directories(out);
  const std::vector<ReportTable> report = report_of(tables);
  write_sweep_report(report, out, {origins_of(tables), notes});
  std::printf("%s%s\nreport:   %s/report.md, results.csv, results.json\n", wrap(printable(notes), 80, 0).c_str(),
              printable(sweep_summary(report)).c_str(), printable(out).c_str());
  return Exit::done;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine program(
      "Trains the tables of a plan: comparisons of one size each, with tuned learning rates and enough seeds. A plan "
      "is a "
      "file of compare's flags (docs/sweep.md).",
      "sweep");
  CLI::App& app = program;
  Options o;
  o.program = argv[0];
  std::string request;  // of the sweep whose child this process is
  CLI::App *run = nullptr, *time = nullptr, *report = nullptr;
  const auto flags = [&] {
    add_text(app, "--one-run", request, "JSON", "for sweep itself").group(hidden_group);
    run = app.add_subcommand("run", "train what is left of a plan, then report");
    time = app.add_subcommand("time", "time a step of each arm beside the first one's, on an idle machine");
    report = app.add_subcommand("report", "the page, figures, CSV and JSON of what has ended");
    for (CLI::App* part : {run, time}) {
      add_text(*part, "plan", o.plan, "PLAN", "the plan, a file").required();
      add_text(*part, "--out", o.call.out, "DIR", "directory of the sweep: a directory for each table").required();
    }
    add_switch(*run, "--dry-run", o.dry, "print cells, time and memory, by measured steps, and stop");
    add_number(*run, "--hours", o.hours, 0, 1e6,
               "as many steps as fit into so many hours; a sweep that was begun keeps its steps");
    add_text(*run, "--part", o.part, "K/N",
             "the K-th of N machines: trains a part of the arms, and the first architecture as a check");
    add_integer(*run, "--jobs", o.jobs, 0, 4096, "cells at a time, each with its share of the threads (0: chosen)");
    add_integer(*time, "--rounds", o.rounds, 3, 1000, "steps of each");
    add_texts(*report, "sweeps", o.dirs, "DIR...", "directories of sweeps: parts of one plan").required();
    add_text(*report, "--out", o.to, "DIR", "where the report goes (default: the first directory)");
    for (CLI::App* part : {run, time, report}) {
      add_text(*part, "--table", o.table, "LIST", "only these tables of the plan, with their budgets");
      const char* what = part == run
                             ? "architectures beside the plan's: train only these, and the first if no record of "
                               "it is in --records"
                             : "architectures beside the plan's";
      add_text(*part, "--arch", o.call.arch, "LIST", what);
      if (part != time)
        add_text(*part, "--records", o.call.records, "DIR", "a finished sweep of this plan, whose cells count, too");
    }
    if (argc < 2 || std::string(argv[1]) != "--one-run") app.require_subcommand(1);
  };
  return run_program(app, argc, argv, flags, [&] {
    if (!request.empty()) return train_for_parent(request);
    if (!world_from_environment().alone())
      fail(Exit::usage, "sweep trains in one process; start it without mpirun, torchrun or srun");
    if (run->parsed()) return run_sweep(o);
    return time->parsed() ? time_sweep(o) : report_sweep(o);
  });
}
