// sweep: a plan of tables (sweep_plan.h), each a comparison of one size: plans, trains, goes on and reports. A cell is
// an ordinary run directory; once it is done its record is enough. Several processes of one machine share the work,
// several machines take a part each.
//
//   sweep run table.plan --out runs/table --dry-run     # cells, hours and memory
//   sweep run table.plan --out runs/table --jobs 2      # train, or go on
//   sweep time table.plan --out runs/table              # steps beside each other, on an idle machine
//   sweep report runs/table                             # the page, figures, CSV and JSON
//   sweep run table.plan --out runs/mine --arch mine --records records     # add a row
#include <omp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/format.h"
#include "cli/needs.h"
#include "cli/program.h"
#include "cli/stop.h"
#include "engine/io/file.h"
#include "engine/io/json_file.h"
#include "engine/io/printable.h"
#include "engine/io/shell.h"
#include "ranks/launch.h"
#include "train/lab/experiment.h"
#include "train/lab/machines.h"
#include "train/lab/side_by_side.h"
#include "train/lab/sweep_report.h"
#include "train/run/inputs.h"

using namespace crossply;

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Options {
  SweepCall call;
  std::string plan, part, program;
  std::vector<std::string> dirs;  // of report
  int64_t jobs = 0, rounds = 15;
  double hours = 0;
  bool dry = false;
};

std::vector<SweepTable> open_tables(const SweepPlan& plan, const Options& o) {
  std::vector<SweepTable> tables;
  for (const PlannedTable& planned : plan.tables) {
    if (!o.call.arch.empty() && !planned.of.empty() && o.call.records.empty()) continue;
    tables.push_back(open_table(planned, o.call));
  }
  return tables;
}

// --- how much there is to do -------------------------------------------------------------------------------------

struct Work {
  int64_t cells = 0;
  double seconds = 0, memory = 0;  // of one cell after the other; of the largest
};

// What is left of a table, by three measured steps of each arm.
Work work_of(const SweepTable& table) {
  Work work;
  for (const Arm& arm : arms_of(table.comparison)) {
    if (!arm.mine) continue;
    const std::vector<size_t> known = needed(arm);
    const auto ended = std::ranges::count_if(known, [&](size_t i) { return !is_unfinished(table.comparison.runs[i]); });
    const int64_t cells = std::max<int64_t>(0, static_cast<int64_t>(runs_planned(arm)) - ended);
    const ComparedRun& run = table.comparison.runs[arm.seeds[0]];
    work.memory = std::max(work.memory, run.result.planned_memory);
    if (cells == 0) continue;
    TrainPlan trial = run.plan;
    trial.resume = false;
    const auto [plan, data] = open_inputs(trial);
    work.cells += cells;
    work.seconds += seconds_of_run(plan, data) * static_cast<double>(cells);
  }
  return work;
}

// How many cells at a time, where --jobs does not say it.
int64_t jobs_of(const SweepTable& table, int64_t asked) {
  return std::max<int64_t>(1, choose_jobs(table.comparison, asked).count);
}

// Prints the work of each table; returns all of it in hours.
double print_work(const std::vector<SweepTable>& tables, int64_t asked) {
  std::vector<std::vector<std::string>> rows = {{"table", "arms", "cells left", "steps", "hours", "memory"}};
  const int64_t jobs = jobs_of(tables[0], asked);
  const int threads = std::max(1, static_cast<int>(omp_get_max_threads() / jobs));
  double seconds = 0;
  int64_t cells = 0;
  omp_set_num_threads(threads);
  for (const SweepTable& table : tables) {
    const Work work = work_of(table);
    const TrainPlan& plan = table.comparison.runs[0].plan;
    const double share = work.seconds / static_cast<double>(jobs);
    seconds += share, cells += work.cells;
    rows.push_back({table.planned.name, str(arms_of(table.comparison).size()), format_count(work.cells),
                    format_count(plan.steps), format_number("%.2f", share / 3600),
                    format_bytes(work.memory * static_cast<double>(jobs))});
  }
  const std::string all = str(format_count(cells), " cells, about ", format_number("%.2g", seconds / 3600),
                              " hours with ", jobs, " at a time, of ", threads, threads == 1 ? " thread" : " threads",
                              " each, by three steps of each arm; evaluations come on top, and up to three more rates "
                              "of an arm where the best is at an edge");
  std::printf("%s%s\n", printable(format_table(rows)).c_str(), wrap(all, 80, 0).c_str());
  return seconds / 3600;
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
      if (key == scaled && equals != std::string::npos)
        line = str(key, " = ", std::max<long long>(1, std::llround(std::atof(line.c_str() + equals + 1) * factor)));
    out += line + "\n";
    begin = end + 1;
  }
  return out;
}

// --- the commands ------------------------------------------------------------------------------------------------

// The plan that is trained: with --hours that of before, if there is one, or this one with as many steps as fit.
SweepPlan choose_plan(const Options& o) {
  const std::string kept = plan_in(o.call.out);
  if (o.hours > 0 && path_exists(kept)) return read_sweep_plan(kept);
  SweepPlan plan = read_sweep_plan(o.plan);
  std::string text = read_file(o.plan, 1 << 20);
  if (o.hours > 0) {
    std::printf("measuring, for --hours %g\n", o.hours);
    Options dry = o;
    dry.call.dry = true;
    const double hours = print_work(open_tables(plan, dry), o.jobs);
    text = scaled_plan(text, o.hours / hours);
    plan = parse_sweep_plan(text, o.plan + " for these hours");
    for (const PlannedTable& table : plan.tables)
      std::printf("%s: %s steps\n", table.name.c_str(), table.flag("--steps").c_str());
  }
  if (!o.dry) {
    fs::create_directories(o.call.out);
    write_file_atomically(kept, text);
  }
  return plan;
}

bool waits_for_others(const std::vector<SweepTable>& tables) {
  return std::ranges::any_of(tables, [](const SweepTable& table) {
    return std::ranges::any_of(table.comparison.runs, [](const ComparedRun& run) { return run.elsewhere; });
  });
}

// Trains what is left, table by table, and again while other processes have cells on which others may depend. Returns
// the error of the last attempt to write a table's files.
std::string train_tables(std::vector<SweepTable>& tables, int64_t asked) {
  const int64_t jobs = jobs_of(tables[0], asked);
  std::string error;
  bool waiting = false;
  while (true) {
    for (SweepTable& table : tables) {
      if (waiting) take_new_records(table.comparison);
      if (runs_left(table.comparison) == 0) continue;
      if (!waiting)
        std::printf("== %s: %lld of %lld cells left\n", table.planned.name.c_str(),
                    static_cast<long long>(runs_left(table.comparison)),
                    static_cast<long long>(runs_in_all(table.comparison)));
      error = train_all(table.comparison, jobs);
      if (stop_requested()) return error;
    }
    if (!waits_for_others(tables)) return error;
    if (!waiting) std::printf("other processes have the cells that are left\n");
    std::fflush(stdout);
    waiting = true;
    for (int i = 0; i < 20 && !stop_requested(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (stop_requested()) return error;
  }
}

// The exit code, and what failed.
Exit conclude(const std::vector<SweepTable>& tables, const Options& o, const std::string& unwritten) {
  int64_t left = 0;
  for (const SweepTable& table : tables) left += runs_left(table.comparison);
  std::string failed;
  Exit code = Exit::done;
  for (const SweepTable& table : tables)
    for (const ComparedRun& run : table.comparison.runs)
      if (run.state == RunState::failed && !diverged(run))
        failed += "\n  " + table.planned.name + "/" + run_name(table.comparison, run) + ": " + run.error,
            code = run.result.code;
  if (stop_requested()) {
    std::printf("\nstopped; the same command goes on: %s run %s --out %s\n", shell_command(o.program).c_str(),
                shell_word(o.plan).c_str(), shell_word(o.call.out).c_str());
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
    for (const auto& [arch, time] : all[table.planned.name].items()) {
      const auto number = [&, &of = time](const char* key) {
        return of.is_object() && of.contains(key) && of[key].is_number() ? of[key].template get<double>() : NAN;
      };
      table.times[arch] = {number("seconds"), number("ratio"), number("low"), number("high")};
    }
  }
}

Exit run_sweep(Options& o) {
  read_part(o);
  o.call.dry = o.dry;
  const SweepPlan plan = choose_plan(o);
  std::vector<Descriptor> held;
  if (!o.dry)
    for (const PlannedTable& planned : plan.tables) held.push_back(hold_table(o.call.out, planned));
  std::vector<SweepTable> tables = open_tables(plan, o);
  for (const SweepTable& table : tables)
    if (!table.note.empty()) std::printf("note: %s\n", printable(table.note).c_str());
  if (o.dry || !o.call.arch.empty()) print_work(tables, o.jobs);
  if (o.dry) return Exit::done;
  for (const SweepTable& table : tables) check_device(table.comparison);
  const std::string unwritten = train_tables(tables, o.jobs);
  take_times(tables, o.call.out);
  write_sweep_report(tables, o.call.out, "");
  std::printf("%s", printable(sweep_summary(tables)).c_str());
  for (const SweepTable& table : tables)
    for (const std::string& arch : table.comparison.only)
      std::printf("\n%s", wrap(printable(place_of(tables, table, arch)), 80, 0).c_str());
  std::printf("\nreport:   %s/report.md, results.csv, results.json\n", printable(o.call.out).c_str());
  return conclude(tables, o, unwritten);
}

Exit time_sweep(const Options& o) {
  const SweepPlan plan = read_sweep_plan(path_exists(plan_in(o.call.out)) ? plan_in(o.call.out) : o.plan);
  Options dry = o;
  dry.call.dry = true;
  json all = json::object();
  for (SweepTable& table : open_tables(plan, dry)) {
    if (!table.planned.of.empty()) continue;
    std::vector<TrainPlan> plans;
    std::vector<std::string> names;
    for (const Arm& arm : arms_of(table.comparison)) {
      const ComparedRun& run = table.comparison.runs[arm.seeds[0]];
      if (run.choice.again > 0 || std::ranges::find(names, arm.arch) != names.end()) continue;
      plans.push_back(run.plan), plans.back().resume = false, plans.back().out.clear();
      names.push_back(arm.arch);
    }
    std::vector<std::vector<std::string>> rows = {{table.planned.name, "ms a step", "time", "quartiles"}};
    const std::vector<StepTime> times = time_steps(plans, o.rounds);
    for (size_t i = 0; i < times.size(); ++i) {
      const StepTime& t = times[i];
      all[table.planned.name][names[i]] = {
          {"seconds", t.seconds}, {"ratio", t.ratio}, {"low", t.low}, {"high", t.high}};
      rows.push_back({names[i], format_number("%.1f", 1e3 * t.seconds), format_number("%.3fx", t.ratio),
                      format_number("%.3f", t.low) + format_number(" to %.3f", t.high)});
    }
    std::printf("%s\n", printable(format_table(rows)).c_str());
  }
  fs::create_directories(o.call.out);
  write_file_atomically(times_in(o.call.out), all.dump(2) + "\n");
  std::printf("times: %s\n", printable(times_in(o.call.out)).c_str());
  return Exit::done;
}

Exit report_sweep(Options& o) {
  const std::string first = o.dirs[0];
  for (const std::string& dir : o.dirs)
    if (!path_exists(plan_in(dir))) fail(Exit::no_input, dir, " is no sweep: it has no sweep.plan");
  const std::string out = o.call.out.empty() ? first : o.call.out;
  o.call.out = first, o.call.dry = true;
  std::vector<SweepTable> tables = open_tables(read_sweep_plan(plan_in(first)), o);
  const std::string notes = merge_sweeps(tables, first, {o.dirs.begin() + 1, o.dirs.end()});
  take_times(tables, first);
  fs::create_directories(out);
  write_sweep_report(tables, out, notes);
  std::printf("%s%s\nreport:   %s/report.md, results.csv, results.json\n", printable(notes).c_str(),
              printable(sweep_summary(tables)).c_str(), printable(out).c_str());
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
      add_text(*part, "plan", o.plan, "PLAN", "the plan").required();
      add_text(*part, "--out", o.call.out, "DIR", "directory of the sweep: a directory for each table").required();
    }
    add_switch(*run, "--dry-run", o.dry, "print cells, hours and memory, by measured steps, and stop");
    add_number(*run, "--hours", o.hours, 0, 1e6,
               "as many steps as fit into so many hours; a sweep that was begun keeps its steps");
    add_text(*run, "--part", o.part, "K/N", "the K-th of N machines: some of the arms, and the first one's check");
    add_text(*run, "--arch", o.call.arch, "LIST",
             "train these alone, beside the plan's; and the first, where it is not stored");
    add_text(*run, "--records", o.call.records, "DIR", "finished cells of this plan, a directory for each table");
    add_integer(*run, "--jobs", o.jobs, 0, 4096, "cells at a time, each with its share of the threads (0: chosen)");
    add_integer(*time, "--rounds", o.rounds, 3, 1000, "steps of each");
    add_texts(*report, "sweeps", o.dirs, "DIR...", "directories of sweeps, of parts of one plan").required();
    add_text(*report, "--out", o.call.out, "DIR", "where the report goes (default: the first directory)");
    if (argc > 1 && std::string(argv[1]) != "--one-run") app.require_subcommand(1);
  };
  return run_program(app, argc, argv, flags, [&] {
    if (!request.empty()) return train_for_parent(request);
    if (!world_from_environment().alone())
      fail(Exit::usage, "sweep trains in one process; start it without mpirun, torchrun or srun");
    if (run->parsed()) return run_sweep(o);
    return time->parsed() ? time_sweep(o) : report_sweep(o);
  });
}
