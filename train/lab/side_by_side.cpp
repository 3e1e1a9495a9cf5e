#include "train/lab/side_by_side.h"

#include <fcntl.h>
#include <omp.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/format.h"
#include "cli/program.h"
#include "cli/standard_streams.h"
#include "cli/stop.h"
#include "engine/io/byte_names.h"
#include "engine/io/json.h"
#include "engine/memory.h"
#include "engine/platform.h"
#include "eval/loaded_model.h"
#include "eval/minimal_pairs.h"
#include "kernels/devices.h"
#include "train/run/environment.h"
#include "train/run/run.h"
#include "train/step/trainer.h"

namespace crossply {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr int reply_descriptor = 3, claim_descriptor = 4;
constexpr int64_t tokens_of_pairs = 8192;  // in a batch
constexpr double max_to_try = 2e11;        // FLOPs of a step that is timed: of larger ones threads have enough to do

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// --- one run -----------------------------------------------------------------------------------------------------

void record_end(ComparedRun& run, RunState state, Exit code, const std::string& message) {
  run.state = state;
  run.error = message;
  run.result.code = code;
  run.result.curves = {};
  run.result.tokens_per_second = 0;
  const std::string error = io_error_of([&] { run.result.curves = read_curves(run.plan.out + "/metrics.jsonl"); });
  if (!error.empty()) Progress(run.choice.text, run.plan.steps).say("note: " + error);
}

// The minimal pairs that are scored after a run: a reported one.
std::string pairs_of(const Comparison& comparison, const ComparedRun& run) {
  return chooses(comparison, run) ? "" : comparison.rules.pairs;
}

// In JSON.
std::string accuracy_on_pairs(const std::string& run_dir, const std::string& path) {
  LoadedModel model(run_dir, "cpu", false);
  const Tokenizer tokenizer = model_tokenizer(model, "");
  const ScoreRequests read(tokenizer, model.config.vocab_size, model.config.max_position_embeddings,
                           beginning_token(model, tokenizer));
  const std::vector<PairFile> files = read_minimal_pairs(path, read);
  std::vector<TokenPair> pairs;
  for (const PairFile& file : files)
    for (const MinimalPair& pair : file.pairs) pairs.push_back(pair.tokens);
  PairScorer scorer(*model.device, model.params, model.config, tokens_of_pairs);
  return json_text(to_json(count_pairs(files, scorer.score(pairs))));
}

// A run that fails ends itself, not the comparison; but flags that are wrong for one are wrong for all.
// pairs: minimal pairs to be scored after it; "": none.
void train_or_record(ComparedRun& run, const std::string& label, int64_t runs_after, const std::string& pairs,
                     const std::function<void(const RunCurves&)>& evaluated = {}) {
  run.error.clear();
  Settings settings = run.plan;
  settings.label = label;
  settings.runs_after = runs_after;
  settings.resume = settings.resume && path_exists(settings.out);
  try {
    run.result = train_run(settings, evaluated);
    run.state = run.result.code == Exit::stopped ? RunState::stopped : RunState::done;
    if (is_done(run) && !pairs.empty()) run.pairs = accuracy_on_pairs(run.plan.out, pairs);
  } catch (const std::exception& error) {
    const Error known = error_of(error, training_memory_remedy);
    if (known.code == Exit::usage) throw;
    record_end(run, RunState::failed, known.code, known.what());
    Progress(label, run.plan.steps).say("failed: " + run.error);
  }
}

// "3/12 lime lr 0.003 seed 2", in front of the lines of a run, as wide as that of any.
std::string label_of(const Comparison& comparison, const ComparedRun& run, int64_t number) {
  size_t widest = 0;
  for (const ComparedRun& other : comparison.runs) widest = std::max(widest, run_name(comparison, other).size());
  const std::string name = run_name(comparison, run);
  return str(number, "/", runs_in_all(comparison), " ", name, std::string(widest - name.size(), ' '));
}

// --- a run in a process of its own -------------------------------------------------------------------------------

struct Pipe {
  Pipe() {
    int ends[2];
    if (!open_pipe(ends)) fail_io("create", "a pipe", errno);
    read = Descriptor(ends[0]), write = Descriptor(ends[1]);
  }
  Descriptor read, write;
};

class RunProcess {
 public:
  // Starts the run. place: in the comparison.
  RunProcess(const Comparison& comparison, size_t place, const std::string& label);
  RunProcess(RunProcess&&) = default;
  RunProcess& operator=(RunProcess&&) = default;
  size_t place() const { return place_; }
  int lines() const { return lines_.read.get(); }
  // What it printed since, line by line but for its status lines; false when it has ended.
  bool read_lines(const std::function<void(const std::string&)>& print);
  // By the one signal of which a second does not end it at once: who stopped this process may have stopped that, too.
  void stop() const { ::kill(pid_, SIGUSR1); }
  // After its end: what became of the run.
  void take_result(ComparedRun& run, const std::string& out);
  // Steps that its metrics have so far.
  int64_t steps();
  // Whether it has been evaluated since the last such call, as often as the plan says.
  bool evaluated(const TrainPlan& plan);

 private:
  size_t place_;
  std::string label_, metrics_, line_;
  Pipe lines_, reply_;
  pid_t pid_ = -1;
  std::streamoff counted_ = 0;
  int64_t steps_ = 0, evaluations_ = 0;
};

std::string request_for(const ComparedRun& run, const std::string& label, const std::string& pairs) {
  const TrainPlan& plan = run.plan;
  const json request = {{"name", run.choice.text},
                        {"settings", all_settings(plan)},
                        {"call", call_settings(plan)},
                        {"data_digest", plan.data_digest},
                        {"label", label},
                        {"pairs", pairs},
                        {"command", command_line()},
                        {"parent", ::getpid()}};
  return json_text(request);
}

RunProcess::RunProcess(const Comparison& comparison, size_t place, const std::string& label)
    : place_(place), label_(label), metrics_(comparison.runs[place].plan.out + "/metrics.jsonl") {
  std::string name = own_program(), flag = "--one-run",
              request = request_for(comparison.runs[place], label, pairs_of(comparison, comparison.runs[place]));
  char* arguments[] = {name.data(), flag.data(), request.data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, lines_.write.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, reply_.write.get(), reply_descriptor);
  if (const Claims* claims = comparison.claims.get())  // a killed sweep leaves it to its runs, until they are gone, too
    posix_spawn_file_actions_adddup2(&actions, claims->descriptor(run_directory(comparison.runs[place])),
                                     claim_descriptor);
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // a Ctrl-C is for the parent, which passes it on
  const int error = ::posix_spawn(&pid_, own_program().c_str(), &actions, &attributes, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) fail_io("start", "a process for " + run_name(comparison, comparison.runs[place]), error);
  lines_.write = Descriptor(), reply_.write = Descriptor();
}

bool RunProcess::read_lines(const std::function<void(const std::string&)>& print) {
  char buffer[4096];
  const ssize_t n = uninterrupted([&] { return ::read(lines(), buffer, sizeof buffer); });
  if (n <= 0) return false;
  for (const char c : std::string(buffer, static_cast<size_t>(n))) {
    if (c != '\n') {
      line_ += c;
      continue;
    }
    const std::string status = label_ + " step ";
    const bool is_status = line_.starts_with(status) && line_.find('/', status.size()) < line_.find(' ', status.size());
    if (!is_status) print(line_);
    line_.clear();
  }
  return true;
}

void RunProcess::take_result(ComparedRun& run, const std::string& out) {
  int status = 0;
  uninterrupted([&] { return ::waitpid(pid_, &status, 0); });
  std::string reply;
  char buffer[4096];
  for (ssize_t n; (n = uninterrupted([&] { return ::read(reply_.read.get(), buffer, sizeof buffer); })) > 0;)
    reply.append(buffer, static_cast<size_t>(n));
  const json answer = try_parse_json(reply);
  try {
    if (answer.is_object()) return take_up(run, answer, out, "the answer of the process of " + run.choice.text);
  } catch (const Error& error) {
    return record_end(run, RunState::failed, error.code, error.what());
  }
  if (stop_requested()) return record_end(run, RunState::stopped, Exit::stopped, "");  // before it could answer
  const std::string how = WIFSIGNALED(status) ? str("signal ", WTERMSIG(status)) : str("code ", WEXITSTATUS(status));
  const bool memory = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  record_end(run, RunState::failed, memory ? Exit::device : Exit::internal,
             "its process ended with " + how + (memory ? "; if memory ran out, use fewer --jobs" : ""));
}

int64_t RunProcess::steps() {
  std::ifstream in(metrics_, std::ios::binary);
  if (!in.seekg(0, std::ios::end)) return 0;
  if (in.tellg() < counted_) counted_ = 0, steps_ = 0;  // begun anew, from a checkpoint
  in.seekg(counted_);
  for (std::string text; std::getline(in, text) && !in.eof();) ++steps_, counted_ = in.tellg();
  return steps_;
}

bool RunProcess::evaluated(const TrainPlan& plan) {
  const int64_t before = evaluations_;
  evaluations_ = steps() / plan.steps_between_evaluations();
  return evaluations_ > before;
}

// --- several at a time -------------------------------------------------------------------------------------------

// One line for all: rewritten on a terminal, every twentieth in a log.
class Overview {
 public:
  explicit Overview(const Comparison& comparison) : comparison_(comparison), tokens_(tokens_per_step(comparison)) {
    for (const ComparedRun& run : comparison.runs) begun_ += is_ended(run) ? static_cast<double>(steps_of(run)) : 0;
  }
  void print(const std::string& line) {
    clear();
    print_line(line, terminal_);
  }
  void show(std::vector<RunProcess>& processes);
  // Steps that a process finds done were not done now.
  void begin(RunProcess& process) { begun_ += static_cast<double>(process.steps()); }
  void clear() {
    if (shown_) std::printf("\r\033[J");
    shown_ = false;
  }

 private:
  static double tokens_per_step(const Comparison& comparison) {
    const TrainPlan& plan = comparison.runs[0].plan;
    return static_cast<double>(plan.batch * plan.accumulate * plan.data.seq_len);
  }
  // For this overview: no process is at it.
  static bool is_ended(const ComparedRun& run) {
    return is_done(run) || run.state == RunState::failed || run.state == RunState::stopped;
  }
  double steps(std::vector<RunProcess>& processes) const;
  const Comparison& comparison_;
  const double tokens_;
  double begun_ = 0;
  const bool terminal_ = takes_escape_codes(STDOUT_FILENO);
  const Clock::time_point start_ = Clock::now();
  Clock::time_point shown_at_ = start_;
  bool shown_ = false;
  int64_t said_ = 0;
};

double Overview::steps(std::vector<RunProcess>& processes) const {
  int64_t all = 0;
  for (const ComparedRun& run : comparison_.runs)
    if (is_ended(run)) all += steps_of(run);
  for (RunProcess& process : processes) all += process.steps();
  return static_cast<double>(all);
}

void Overview::show(std::vector<RunProcess>& processes) {
  if (since(shown_at_) < 0.2) return;
  shown_at_ = Clock::now();
  const int64_t in_all = runs_in_all(comparison_), runs_to_do = runs_left(comparison_),
                steps_each = comparison_.runs[0].plan.steps;
  const double done = steps(processes) - begun_, seconds = since(start_);
  double to_do = static_cast<double>(runs_to_do * steps_each);
  for (RunProcess& process : processes) to_do -= static_cast<double>(process.steps());
  if (done <= 0 || seconds < 1) return;
  const int64_t twentieth = static_cast<int64_t>(20 * done / (done + to_do));
  if (!terminal_ && twentieth == said_) return;
  said_ = twentieth;
  const std::string rate = format_count(static_cast<int64_t>(done * tokens_ / seconds));
  std::string line = str(runs_ended(comparison_), " of ", in_all, " runs done, ", processes.size(), " running  ", rate,
                         " tok/s  ", format_seconds(to_do * seconds / done), " left in all");
  if (!terminal_) return print(line);
  clear();
  line.resize(std::min(line.size(), terminal_width() - 1));
  std::printf("%s", line.c_str());
  std::fflush(stdout);
  shown_ = true;
}

// Waits a little for lines of any process, and prints them; returns those that have ended.
std::vector<size_t> wait_for(std::vector<RunProcess>& processes, Overview& overview) {
  std::vector<pollfd> polled;
  for (const RunProcess& process : processes) polled.push_back({process.lines(), POLLIN, 0});
  std::vector<size_t> ended;
  if (::poll(polled.data(), polled.size(), 500) <= 0) return ended;
  for (size_t i = 0; i < polled.size(); ++i)
    if (polled[i].revents != 0 && !processes[i].read_lines([&](const std::string& line) { overview.print(line); }))
      ended.push_back(i);
  return ended;
}

double seconds_of_step(const TrainPlan& plan, const Source& data, int threads) {
  omp_set_num_threads(threads);
  Trainer trainer(plan, data);
  trainer.step();  // the first one takes memory
  const Clock::time_point start = Clock::now();
  int64_t steps = 0;
  do trainer.step(), ++steps;
  while (since(start) < 0.3);
  return since(start) / static_cast<double>(steps);
}

// compare.svg, with the curves so far of those that were evaluated since the last call.
void draw_evaluated(Comparison& comparison, std::vector<RunProcess>& processes) {
  bool any = false;
  for (RunProcess& process : processes) {
    ComparedRun& run = comparison.runs[process.place()];
    if (!process.evaluated(run.plan)) continue;
    any = true;
    io_error_of([&] { run.result.curves = read_curves(run.plan.out + "/metrics.jsonl"); });
  }
  if (any) draw_comparison(comparison);
}

// How many of the largest runs have room in the available memory at a time, one at least.
int64_t runs_that_fit(const Comparison& comparison) {
  double memory = 1;
  for (const ComparedRun& run : comparison.runs) memory = std::max(memory, run.result.planned_memory);
  return static_cast<int64_t>(std::max(1.0, 0.8 * static_cast<double>(available_memory()) / memory));
}

}  // namespace

Jobs choose_jobs(const Comparison& comparison, int64_t asked) {
  const ComparedRun& first = comparison.runs[0];
  const int64_t runs = runs_left(comparison);
  const int64_t fitting = runs_that_fit(comparison);
  if (asked > 0) {
    const int64_t count = std::max<int64_t>(1, std::min(asked, runs));
    if (count <= fitting || backend_of(first.plan.device) == Backend::cuda) return {count, ""};
    return {count, str("warning: the memory of this machine may be too small for ", count,
                       " runs at a time; with --jobs ", fitting, " it is large enough")};
  }
  const bool several = comparison.runs.size() > arms_of(comparison).size();
  const int cores = omp_get_max_threads();
  const double tokens = static_cast<double>(first.plan.batch * first.plan.accumulate * first.plan.data.seq_len);
  const int64_t most = std::min<int64_t>({cores, runs, fitting});
  if (!several || backend_of(first.plan.device) == Backend::cuda || most < 2) return {};
  if (first.result.accounting.flops_per_token * tokens > max_to_try)
    return {1, "one run at a time: a step is large enough for all threads (--jobs changes that)"};
  Settings trial = first.plan;
  trial.lr = trial.router_lr = 0;  // where a rate is too high
  const auto [plan, data] = open_inputs(trial);
  const double all = seconds_of_step(plan, *data.train, cores), one = seconds_of_step(plan, *data.train, 1);
  omp_set_num_threads(cores);
  const int64_t count = static_cast<double>(most) * all > 1.1 * one ? most : 1;
  return {count, str(count == 1 ? "one run" : str(count, " runs"), " at a time (--jobs): a step takes ",
                     format_number("%.3g", 1e3 * all), " ms with ", cores, " threads, ",
                     format_number("%.3g ms with one", 1e3 * one))};
}

// The next run that no other process has: it is this one's from now on. What others have ended is taken up first.
static std::optional<size_t> take_next(Comparison& comparison) {
  if (comparison.claims == nullptr) return next_run(comparison);
  Claims& claims = *comparison.claims;
  for (ComparedRun& run : comparison.runs)
    if (run.elsewhere) run.elsewhere = claims.is_elsewhere(run_directory(run));
  take_new_records(comparison);
  while (const auto next = next_run(comparison)) {
    const std::string name = run_directory(comparison.runs[*next]);
    if (!claims.take(name)) {
      comparison.runs[*next].elsewhere = true;
    } else if (take_new_records(comparison)) {  // ended between the two
      claims.give_back(name);
    } else {
      return next;
    }
  }
  return {};
}

static void give_back(const Comparison& comparison, size_t place) {
  if (comparison.claims != nullptr) comparison.claims->give_back(run_directory(comparison.runs[place]));
}

static void train_one_by_one(Comparison& comparison, const std::function<void()>& after_each) {
  int64_t number = runs_in_all(comparison) - runs_left(comparison);
  while (const auto next = take_next(comparison)) {
    ComparedRun& run = comparison.runs[*next];  // until after_each(), which may add runs
    const std::string label = label_of(comparison, run, ++number);
    const int64_t runs_after = runs_left(comparison) - 1;
    run.tried = true;
    run.state = RunState::running;
    train_or_record(run, label, runs_after, pairs_of(comparison, run), [&](const RunCurves& curves) {
      run.result.curves = curves;
      draw_comparison(comparison);  // what it cannot write, after_each says
    });
    const bool stopped = run.state == RunState::stopped;
    after_each();
    give_back(comparison, *next);
    if (stopped || stop_requested()) return;
  }
}

static void train_side_by_side(Comparison& comparison, int64_t jobs, const std::function<void()>& after_each) {
  catch_stop_signals();
  ::setenv("OMP_NUM_THREADS", std::to_string(std::max<int64_t>(1, omp_get_max_threads() / jobs)).c_str(), 1);
  std::vector<RunProcess> processes;
  Overview overview(comparison);
  int64_t number = runs_in_all(comparison) - runs_left(comparison);
  bool told = false;
  while (true) {
    for (std::optional<size_t> next;
         static_cast<int64_t>(processes.size()) < jobs && !stop_requested() && (next = take_next(comparison));) {
      ComparedRun& run = comparison.runs[*next];
      processes.emplace_back(comparison, *next, label_of(comparison, run, ++number));
      if (run.state == RunState::waiting) overview.begin(processes.back());
      run.tried = true;
      run.state = RunState::running;
    }
    if (processes.empty()) break;
    if (stop_requested() && !told) {
      for (const RunProcess& process : processes) process.stop();
      told = true;
    }
    const std::vector<size_t> ended = wait_for(processes, overview);
    for (auto i = ended.rbegin(); i != ended.rend(); ++i) {
      const size_t place = processes[*i].place();
      ComparedRun& run = comparison.runs[place];
      const int64_t before = run.side_by_side;  // in its earlier parts
      processes[*i].take_result(run, comparison.out);
      run.side_by_side = std::max(before, jobs);
      processes.erase(processes.begin() + static_cast<std::ptrdiff_t>(*i));
      overview.clear();
      after_each();  // `run` may be elsewhere now
      give_back(comparison, place);
    }
    draw_evaluated(comparison, processes);
    overview.show(processes);
  }
  overview.clear();
}

std::string train_all(Comparison& comparison, int64_t jobs) {
  std::string told;
  const auto write_all = [&] {
    const std::string of_records = write_records(comparison), of_results = write_results(comparison);
    return of_records.empty() ? of_results : of_records;
  };
  const auto after_each = [&] {
    extend(comparison);
    const std::string error = write_all();
    if (!error.empty() && error != told) print_line("note: " + error + "; the runs go on", false);
    told = error;
  };
  if (jobs > 1) train_side_by_side(comparison, jobs, after_each);
  else train_one_by_one(comparison, after_each);
  return write_all();  // also if no run was left to do: --arch may show others now
}

// The inverse of request_for; the run's label is in its options.
static Comparison read_request(const std::string& request) {
  try {
    const json task = try_parse_json(request);
    die_with_parent();  // as one process: what kills the comparison kills its runs
    if (task.at("parent") != ::getppid()) fail(Exit::usage, "the comparison has ended");
    ComparedRun run{parse_arch(task.at("name").get<std::string>()), {}, {}};
    take_settings(task.at("settings"), "--one-run", run.plan);  // a plan, as flags.json has it
    take_call_settings(task.at("call"), "--one-run", run.plan);
    task.at("label").get_to(run.plan.label);
    task.at("data_digest").get_to(run.plan.data_digest);
    task.at("command").get_to(run.plan.command);
    Comparison alone{"", "", {run}};
    task.at("pairs").get_to(alone.rules.pairs);
    return alone;
  } catch (const json::exception&) {
    fail(Exit::usage, "--one-run is for compare and sweep themselves");
  }
}

Exit train_for_parent(const std::string& request) {
  Comparison alone = read_request(request);
  ComparedRun& run = alone.runs[0];
  const TrainPlan& plan = run.plan;
  const std::string label = plan.label;
  run.result = plan_training(plan);
  try {
    train_or_record(run, label, 0, alone.rules.pairs);
  } catch (const std::exception& error) {
    record_end(run, RunState::failed, error_of(error, training_memory_remedy).code, error.what());
    Progress(label, plan.steps).say("failed: " + run.error);
  }
  std::fflush(stdout);
  const std::string reply = json_text_mended(to_json(alone, run));
  for (size_t at = 0; at < reply.size();) {
    const ssize_t n = uninterrupted([&] { return ::write(reply_descriptor, reply.data() + at, reply.size() - at); });
    if (n < 0) fail_io("answer", "the comparison", errno);
    at += static_cast<size_t>(n);
  }
  return Exit::done;
}

}  // namespace crossply
