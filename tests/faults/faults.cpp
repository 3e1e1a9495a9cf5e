// What a run survives: every call on a file fails once, one after the other, and the process is killed at every one, in
// a tiny run that saves, in its continuation, and in its evaluation. Afterwards every checkpoint is valid, none is
// lost, and a continued run equals one that nothing happened to, bit for bit.
// The same for other programs that write files: none is written by half, the program called again writes all of them as
// if nothing had happened, and no temporary stays.
//   fault_injection BUILD_DIR PRELOAD [--every N]   one in N of the faults (default: all)
// Exit code 77 is "skipped": where nothing can be loaded in front of a program.
#include <fcntl.h>
#include <sys/wait.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <map>
#include <set>
#include <sstream>

#include "cli/program.h"
#include "data/tokenizer.h"
#include "engine/io/json.h"
#include "engine/rng.h"
#include "models/disk/checkpoint.h"
#include "tests/fuzz/target.h"

using namespace crossply;
using fuzz::read_file, fuzz::scratch, fuzz::write_file;
namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr int last_step = 6;

struct Options {
  std::string build, preload;
  int64_t every = 1, jobs = 2;
};

struct Fault {
  std::string scenario, kind, call;  // kind: the name of an errno, short, kill or tear; call: its name and path
  long at;
  std::string str() const { return scenario + " " + kind + " " + call + " (call " + std::to_string(at) + ")"; }
};

// A directory of its own for the program: DIR/data.txt and DIR/run.
struct RunDirectory {
  std::string dir;
  std::string run() const { return dir + "/run"; }
  std::string log() const { return dir + ".log"; }
  std::string output() const { return dir + ".out"; }
};

const std::map<std::string, int> numbers = {{"EIO", EIO},       {"EINTR", EINTR},   {"EACCES", EACCES},
                                            {"ENOSPC", ENOSPC}, {"ENOMEM", ENOMEM}, {"ENOLCK", ENOLCK}};

// What can happen to a call.
std::vector<std::string> kinds_of(const std::string& call) {
  static const std::map<std::string, std::vector<std::string>> kinds = {
      {"open", {"EACCES", "EIO", "EINTR"}},
      {"read", {"EIO", "EINTR", "short"}},
      {"write", {"ENOSPC", "EIO", "EINTR", "short", "tear"}},
      {"close", {"EIO", "EINTR"}},
      {"fsync", {"EIO", "ENOSPC", "EINTR"}},
      {"flock", {"EINTR", "ENOLCK"}},
      {"mmap", {"ENOMEM"}},
      {"mkdir", {"ENOSPC", "EACCES"}},
      {"rename", {"EIO", "ENOSPC", "EACCES"}},
      {"readdir", {"EIO"}}};
  const auto found = kinds.find(call);
  std::vector<std::string> list = found != kinds.end() ? found->second : std::vector<std::string>{"EACCES", "EIO"};
  list.push_back("kill");
  return list;
}

// A program that writes files, called where a run is.
struct Program {
  std::vector<std::string> words;
  std::vector<std::string> files;       // what it writes, the same each time
  std::vector<std::string> again = {};  // flags for a second call, which continues what the first one did
};

const std::vector<std::string> tiny = {
    "--data", "text:data.txt", "--eval-samples", "2", "--batch", "2", "--steps", "1", "--keep", "1"};
const std::vector<std::string> tiny_model = {"--seq", "8",        "--width", "4",       "--ffn",
                                             "4",     "--layers", "1",       "--heads", "1"};

std::vector<std::string> joined(std::vector<std::string> words, const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// By the names of scenarios.
const std::map<std::string, Program>& programs() {
  static const std::map<std::string, Program> all = {
      {"curves", {{"curves", "run", "--loss", "train", "--out", "fig.svg"}, {"fig.svg"}}},
      {"gradients",
       {{"gradients", "--model", "run", "--tokens", "tokens.txt", "--batch", "1", "--seq", "8", "--out", "grads"},
        {"grads"}}},
      {"analyze",
       {{"analyze", "--model", "run", "--data", "text:data.txt", "--what", "entropy", "--sequences", "2", "--length",
         "8", "--out", "found"},
        {"found/entropy.json", "found/entropy.csv", "found/entropy.svg"}}},
      {"prepare",
       {{"prepare", "--tokenizer", "tokenizer.json", "--eot", "z", "--val", "0.1", "--out", "tokens", "data.txt",
         "more.jsonl"},
        {"tokens/train_000001.bin", "tokens/val_000001.bin", "tokens/tokenizer.json"}}},
      {"transplant",
       {{"transplant", "--model", "run", "--blocks", "0,0", "--out", "new"},
        {"new/model.safetensors", "new/config.json"}}},
      {"average",
       {{"average", "--model", "run", "--last", "1", "--out", "new"}, {"new/model.safetensors", "new/average.json"}}},
      {"compare",
       {joined(joined({"compare", "--arch", "llama,lime", "--out", "runs", "--jobs", "1"}, tiny), tiny_model),
        {"runs/llama/step_00000001/model.safetensors", "runs/lime/step_00000001/model.safetensors", "runs/compare.svg"},
        {"--resume"}}},
      {"inheritune",
       {joined({"train_inheritune", "--reference", "run", "--start", "1", "--out", "grown", "--seq", "8"}, tiny),
        {"grown/round_1_blocks_1/step_00000001/model.safetensors", "grown/inheritune.svg"},
        {"--resume"}}}};
  return all;
}

std::vector<std::string> command(const Options& o, const std::string& scenario, bool again) {
  if (const auto program = programs().find(scenario); program != programs().end()) {
    std::vector<std::string> words =
        joined(program->second.words, again ? program->second.again : std::vector<std::string>());
    words[0] = o.build + "/" + words[0];
    return words;
  }
  if (scenario == "evaluate") return {o.build + "/evaluate", "--model", "run", "--data", "text:data.txt"};
  std::vector<std::string> words = {o.build + "/train_llama", "--data", "text:data.txt", "--out", "run", "--steps",
                                    std::to_string(last_step)};
  for (const char* word :
       {"--tensorboard", "--csv", "--save-every", "2", "--keep",  "1", "--eval-samples", "2", "--width", "4",
        "--ffn",         "4",     "--layers",     "1", "--heads", "1", "--batch",        "2", "--seq",   "8"})
    words.push_back(word);
  if (scenario == "resume") words.push_back("--resume");
  return words;
}

void prepare_preload(const Options& o, const RunDirectory& place, const Fault* fault) {
  ::setenv("LD_PRELOAD", o.preload.c_str(), 1);
  ::setenv("FAULT_DIR", place.dir.c_str(), 1);
  if (fault == nullptr) {
    ::setenv("FAULT_LOG", place.log().c_str(), 1);
    return;
  }
  const auto number = numbers.find(fault->kind);
  ::setenv("FAULT_AT", std::to_string(fault->at).c_str(), 1);
  ::setenv("FAULT_KIND", number == numbers.end() ? fault->kind.c_str() : std::to_string(number->second).c_str(), 1);
}

// Runs a program, with its calls counted, and maybe one of them not as usual. Returns wait's status.
int execute(const Options& o, const RunDirectory& place, const std::string& scenario, const Fault* fault, bool counted,
            bool again = false) {
  const auto words = command(o, scenario, again);
  const pid_t child = ::fork();
  if (child == 0) {
    const int null = ::open("/dev/null", O_RDONLY);
    const int out = ::open(place.output().c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ::dup2(null, 0), ::dup2(out, 1), ::dup2(out, 2);
    ::close(null), ::close(out);
    if (::chdir(place.dir.c_str()) != 0) ::_exit(127);
    ::setenv("OMP_NUM_THREADS", "1", 1);
    if (counted) prepare_preload(o, place, fault);
    std::vector<char*> argv;
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child) fail(Exit::io, "cannot run ", words[0]);
  return status;
}

// The line of a program's output that says what went wrong.
std::string error_in(const std::string& output) {
  const size_t at = output.rfind("error: ");
  return at == std::string::npos ? output : output.substr(at, output.find('\n', at) - at);
}

bool ended_with(int status, int code) { return WIFEXITED(status) && WEXITSTATUS(status) == code; }

std::string step_name(int step) { return "step_0000000" + std::to_string(step); }

std::set<std::string> names_in(const std::string& dir) {
  std::set<std::string> names;
  if (fs::exists(dir))
    for (const auto& entry : fs::directory_iterator(dir)) names.insert(entry.path().filename().string());
  return names;
}

std::string join(const std::set<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += " " + name;
  return all;
}

// metrics.jsonl without what depends on the clock. A last line without its end was cut by a kill.
std::vector<std::string> metrics_of(const std::string& run, bool whole) {
  std::vector<std::string> lines;
  const std::string text = read_file(run + "/metrics.jsonl");
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = text.find('\n', begin);
    if (end == std::string::npos && !whole) break;
    json line = try_parse_json(text.substr(begin, end - begin));
    if (line.is_object()) line.erase("seconds"), line.erase("tokens_per_s");
    lines.push_back(line.is_discarded() ? "no JSON" : json_text(line));
    if (end == std::string::npos) break;
  }
  return lines;
}

// The files of a checkpoint, without the clock.
std::map<std::string, std::string> contents_of(const std::string& dir) {
  std::map<std::string, std::string> files;
  for (const std::string& name : names_in(dir)) {
    files[name] = name == "manifest.json" ? "" : read_file(dir + "/" + name);
    if (name != "train_state.json") continue;
    json state = known_json(files[name]);
    state.erase("seconds");
    state["trajectory"].erase("data");  // an absolute path, of another directory in every experiment
    files[name] = json_text(state);
  }
  return files;
}

class Experiment {
 public:
  explicit Experiment(const Options& options)
      : o_(options), nothing_{scratch() + "/nothing"}, whole_{scratch() + "/whole"}, part_{scratch() + "/part"} {}

  Exit run() {
    std::string text;
    for (uint64_t i = 0; i < 2000; ++i) text += static_cast<char>('a' + random_bits(1, 1, i) % 26);
    for (const RunDirectory& place : {nothing_, whole_, part_}) {
      fs::create_directory(place.dir);
      write_file(place.dir + "/data.txt", text);
      write_file(place.dir + "/more.jsonl", "{\"text\": \"" + text + "\"}\n{\"text\": \"more\"}\n");
      write_file(place.dir + "/tokens.txt", "1 2 3 4 5 6 7 8 9\n");
      Tokenizer::bytes().save(place.dir);
    }
    if (!ended_with(execute(o_, whole_, "train", nullptr, false), 0)) fail(Exit::internal, read_file(whole_.output()));
    execute(o_, part_, "train", nullptr, true);
    if (names_in(scratch()).count("part.log") == 0 || read_file(part_.log()).empty()) {
      std::printf("skipped: %s cannot be loaded in front of these programs\n", o_.preload.c_str());
      return static_cast<Exit>(77);
    }
    return run_faults();
  }

 private:
  std::vector<std::string> calls_of(const std::string& scenario, const RunDirectory& start) {
    const RunDirectory place = fresh(start, 0);
    const int status = execute(o_, place, scenario, nullptr, true);
    if (!ended_with(status, 0)) fail(Exit::internal, scenario, " fails by itself: ", read_file(place.output()));
    if (scenario == "evaluate") scores_ = read_file(place.output());
    if (programs().contains(scenario))
      for (const std::string& file : programs().at(scenario).files) results_[scenario][file] = contents(place, file);
    std::istringstream log(read_file(place.log()));
    std::vector<std::string> calls;
    for (std::string line; std::getline(log, line);) calls.push_back(line);
    return calls;
  }

  // A copy of a place to work in.
  RunDirectory fresh(const RunDirectory& start, int job) const {
    const RunDirectory place{scratch() + "/job" + std::to_string(job)};
    fs::remove_all(place.dir);
    fs::remove(place.log());
    fs::create_directory(place.dir);
    fs::copy(start.dir, place.dir, fs::copy_options::recursive);
    return place;
  }

  // The place where a scenario starts: train from nothing; resume where the last line of the metrics was cut by a kill.
  // All jobs read it, none writes there.
  const RunDirectory& start_of(const std::string& scenario) const {
    return scenario == "train" ? nothing_ : scenario == "resume" ? part_ : whole_;
  }

  void cut_short(const std::vector<std::string>& calls) {
    const auto last = std::find(calls.rbegin(), calls.rend(), "write run/metrics.jsonl");
    if (last == calls.rend()) fail(Exit::internal, "the run writes no metrics");
    const Fault tear{"train", "tear", *last, static_cast<long>(calls.rend() - last)};
    fs::remove_all(part_.run());
    execute(o_, part_, "train", &tear, true);
  }

  Exit run_faults() {
    std::vector<Fault> faults;
    std::vector<std::string> scenarios = {"train", "resume", "evaluate"};
    for (const auto& [name, program] : programs()) scenarios.push_back(name);
    for (const std::string& scenario : scenarios) {
      const auto calls = calls_of(scenario, start_of(scenario));
      for (size_t i = 0; i < calls.size(); ++i)
        for (const std::string& kind : kinds_of(calls[i].substr(0, calls[i].find(' '))))
          faults.push_back({scenario, kind, calls[i], static_cast<long>(i) + 1});
      if (scenario == "train") cut_short(calls);
      calls_[scenario] = calls;
    }
    const size_t all = faults.size();
    uint64_t number = 0;
    std::erase_if(faults, [&](const Fault&) { return mix_bits(++number) % static_cast<uint64_t>(o_.every) != 0; });
    for (const auto& [scenario, calls] : calls_) std::printf("%s: %zu calls\n", scenario.c_str(), calls.size());
    std::printf("%zu of %zu faults\n", faults.size(), all);
    std::fflush(stdout);
    return in_parallel(faults);
  }

  Exit in_parallel(const std::vector<Fault>& faults) {
    const size_t jobs = static_cast<size_t>(o_.jobs);
    std::vector<pid_t> children;
    for (size_t job = 0; job < jobs; ++job) {
      children.push_back(::fork());
      if (children.back() == 0) ::_exit(work(faults, job, jobs) ? 0 : 1);
    }
    bool good = true;
    for (const pid_t child : children) {
      int status = 1;
      ::waitpid(child, &status, 0);
      good = good && status == 0;
    }
    std::printf(good ? "every fault is survived\n" : "not every fault is survived\n");
    return good ? Exit::done : Exit::internal;
  }

  bool work(const std::vector<Fault>& faults, size_t job, size_t jobs) noexcept {
    bool good = true;
    for (size_t i = job; i < faults.size(); i += jobs) {
      const RunDirectory place = fresh(start_of(faults[i].scenario), static_cast<int>(job));
      const std::string what = try_fault(faults[i], place);
      if (what.empty()) continue;
      good = false;
      std::printf("FAIL: %s: %s\n", faults[i].str().c_str(), what.c_str());
      std::fflush(stdout);
    }
    return good;
  }

  // "" if all is well, else what is wrong.
  std::string try_fault(const Fault& fault, const RunDirectory& place) const {
    const int status = execute(o_, place, fault.scenario, &fault, true);
    const std::string output = read_file(place.output());
    const bool killed = fault.kind == "kill" || fault.kind == "tear";
    const bool harmless = fault.kind == "EINTR" || fault.kind == "short";
    const bool expected = killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                 : ended_with(status, 0) || (!harmless && ended_with(status, 74));
    if (!expected && WIFSIGNALED(status)) return str("signal ", WTERMSIG(status), ": ", error_in(output));
    if (!expected) return str("exit code ", WEXITSTATUS(status), ": ", error_in(output));
    if (programs().contains(fault.scenario)) return check_program(fault, place, ended_with(status, 0));
    if (fault.scenario == "evaluate") {
      return ended_with(status, 0) && output != scores_ ? "another result: " + output : "";
    }
    const std::string wrong = check_left(fault, place);
    if (!wrong.empty()) return wrong;
    if (!ended_with(execute(o_, place, "resume", nullptr, false), 0))
      return "resume: " + error_in(read_file(place.output()));
    return check_same(place);
  }

  static std::string contents(const RunDirectory& place, const std::string& file) {
    return fs::exists(place.dir + "/" + file) ? read_file(place.dir + "/" + file) : "";
  }

  // "" if all files of a program are there and as they should be; else the first that is not.
  std::string other_file(const Fault& fault, const RunDirectory& place) const {
    for (const auto& [file, whole] : results_.at(fault.scenario))
      if (contents(place, file) != whole) return file;
    return "";
  }

  std::string check_program(const Fault& fault, const RunDirectory& place, bool done) const {
    const Program& program = programs().at(fault.scenario);
    for (const auto& [file, whole] : results_.at(fault.scenario))
      if (const std::string now = contents(place, file); program.again.empty() && !now.empty() && now != whole)
        return "written by half: " + file;
    if (const std::string file = other_file(fault, place); done && !file.empty()) return "done, with another " + file;
    if (!other_file(fault, place).empty() || !program.again.empty()) {
      if (!ended_with(execute(o_, place, fault.scenario, nullptr, false, true), 0))
        return "called again: " + error_in(read_file(place.output()));
      if (const std::string file = other_file(fault, place); !file.empty()) return "called again: another " + file;
    }
    for (const auto& entry : fs::recursive_directory_iterator(place.dir))
      if (const std::string name = entry.path().filename(); name.starts_with(".tmp-") || name.ends_with(".partial"))
        return entry.path().string() + " stays";
    return "";
  }

  // The last step whose checkpoint had its name before the fault.
  int saved_before(const Fault& fault) const {
    int step = fault.scenario == "resume" ? 4 : 0;
    const auto& calls = calls_.at(fault.scenario);
    for (long i = 0; i + 1 < fault.at; ++i)
      for (int s = 2; s <= last_step; s += 2)
        if (calls[static_cast<size_t>(i)] == "rename run/" + step_name(s)) step = std::max(step, s);
    return step;
  }

  std::string check_left(const Fault& fault, const RunDirectory& place) const {
    int newest = 0;
    for (const std::string& name : names_in(place.run())) {
      if (name.starts_with("damaged_")) return "a good checkpoint is called " + name;
      if (!name.starts_with("step_")) continue;
      std::string why;
      if (!is_valid_checkpoint(place.run() + "/" + name, &why)) return why;
      newest = std::max(newest, std::stoi(name.substr(5)));
    }
    if (newest < saved_before(fault)) return str("the newest checkpoint is of step ", newest);
    const auto lines = metrics_of(place.run(), false);
    auto all = metrics_of(whole_.run(), true);
    if (static_cast<int>(lines.size()) < newest || lines.size() > all.size())
      return str(lines.size(), " lines of metrics, step ", newest, " is saved");
    all.resize(lines.size());
    return lines == all ? "" : "other metrics";
  }

  std::string check_same(const RunDirectory& place) const {
    const std::string run = place.run(), whole = whole_.run(), last = "/" + step_name(last_step);
    auto names = names_in(run);
    // A complete checkpoint that was to be removed may stay, where there was no later save.
    for (int step = 2; step < last_step; step += 2) names.erase(step_name(step));
    names.erase("metrics.jsonl.kept-1");  // of a run that had no checkpoint yet
    if (names != names_in(whole)) return "after resuming there are" + join(names_in(run));
    if (metrics_of(run, true) != metrics_of(whole, true)) return "after resuming: other metrics";
    if (contents_of(run + last) != contents_of(whole + last)) return "after resuming: another model";
    return "";
  }

  Options o_;
  RunDirectory nothing_, whole_, part_;
  std::map<std::string, std::vector<std::string>> calls_;              // by scenario
  std::map<std::string, std::map<std::string, std::string>> results_;  // of programs, by scenario and file
  std::string scores_;                                                 // what evaluate says
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Lets every call on a file fail in a tiny run, one after the other.", "fault_injection");
  Options o;
  auto flags = [&] {
    app.add_option("build", o.build, "where the programs are")->required();
    app.add_option("preload", o.preload, "the library to load in front of them")->required();
    app.add_option("--every", o.every, "one in so many faults")->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--jobs", o.jobs, "so many at a time")->check(CLI::PositiveNumber)->capture_default_str();
  };
  return run_program(app, argc, argv, flags, [&] {
    o.build = fs::absolute(o.build).string(), o.preload = fs::absolute(o.preload).string();
    return Experiment(o).run();
  });
}
