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
#include <filesystem>
#include <thread>

#include "dev/bench.h"
#include "engine/check.h"
#include "engine/io/python_program.h"
#include "engine/platform.h"

namespace crossply {
namespace {

struct Pipe {
  int read = -1, write = -1;
};

// Closed in every program started: a competitor that held another's pipe would keep it from seeing its end.
Pipe make_pipe() {
  int ends[2];
  if (pipe(ends) != 0) fail(Exit::io, "no pipe to another process");
  for (const int end : ends) fcntl(end, F_SETFD, FD_CLOEXEC);
  return {ends[0], ends[1]};
}

std::vector<std::string> changed_environment(const std::vector<std::string>& changes) {
  auto name = [](const std::string& variable) { return variable.substr(0, variable.find('=')); };
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) variables.push_back(*variable);
  for (const std::string& change : changes) {
    std::erase_if(variables, [&](const std::string& variable) { return name(variable) == name(change); });
    if (change.find('=') != std::string::npos) variables.push_back(change);
  }
  return variables;
}

// Ends with the null that exec wants.
std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (std::string& s : strings) out.push_back(s.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

std::string script_path(const std::string& script) {
  const std::filesystem::path program = own_program();
  return (program.parent_path() / BENCH_SCRIPTS / script).string();
}

Process::Process(const std::vector<std::string>& command, const std::vector<std::string>& environment, bool quiet) {
  std::signal(SIGPIPE, SIG_IGN);  // a competitor that is gone is no reason to end
  std::vector<std::string> words = command, variables = changed_environment(environment);
  const Pipe in = make_pipe(), out = make_pipe();
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in.read, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out.write, STDOUT_FILENO);
  if (quiet) posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  if (posix_spawnp(&pid_, words[0].c_str(), &actions, nullptr, pointers(words).data(), pointers(variables).data()) != 0)
    pid_ = -1;
  posix_spawn_file_actions_destroy(&actions);
  close(in.read);
  close(out.write);
  input_ = in.write;
  output_ = out.read;
}

Process::~Process() {
  close(input_);
  close(output_);
  end();
}

int Process::end() {
  int status = 0;
  if (pid_ <= 0 || waitpid(std::exchange(pid_, -1), &status, 0) < 0) return 127;  // as a shell's for what is not there
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

void Process::ask(const std::string& line) {
  const std::string text = line + "\n";
  if (write(input_, text.data(), text.size()) < 0) return;  // the answer will be missing, which says it all
}

std::optional<std::string> Process::answer() {
  size_t end;
  while ((end = received_.find('\n')) == std::string::npos) {
    char buffer[4096];
    const ssize_t count = read(output_, buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    received_.append(buffer, static_cast<size_t>(count));
  }
  const std::string line = received_.substr(0, end);
  received_.erase(0, end + 1);
  return line;
}

void end_with_input(double seconds) {
  setpgid(0, 0);  // with the programs that it starts
  std::thread([=] {
    const double end = now() + seconds;
    pollfd input{STDIN_FILENO, POLLIN, 0};
    char unread[64];
    for (double left = seconds; left > 0; left = end - now()) {
      const int ready = poll(&input, 1, static_cast<int>(std::min(1e6, std::ceil(1e3 * left))));
      if (ready > 0 && read(STDIN_FILENO, unread, sizeof unread) <= 0) break;
    }
    kill(0, SIGKILL);  // a GPU may never answer: nothing here waits for it
  }).detach();
}

// ---------------------------------------------------------------------------------------------------------------------

Torch::Torch(const BenchFlags& flags) {
  python_ = python_program();
  if (flags.no_torch) return;
  // Python would look for torch in the current directory first, and where PYTHONPATH has an empty part ("/x:").
  const std::string code =
      "import os, sys; given = os.environ.get('PYTHONPATH') or 'none'\n"
      "unwanted = [''] + [os.getcwd()] * ('' in given.split(os.pathsep))\n"
      "sys.path = [p for p in sys.path if p not in unwanted]\n"
      "import torch; print(torch.__version__)";
  Process probe({python_, "-c", code}, environment(), true);
  version_ = probe.answer().value_or("");
  if (available()) print_text("PyTorch ", version_, "\n");
  else print_text(python_, " has no PyTorch: no comparison. PYTHON names another Python.\n");
}

std::vector<std::string> Torch::command(const std::string& script, const std::vector<std::string>& flags) const {
  std::vector<std::string> words = {python_, script_path(script), "--threads", std::to_string(omp_get_max_threads())};
  words.insert(words.end(), flags.begin(), flags.end());
  return words;
}

std::unique_ptr<Process> Torch::start(const std::string& script, const std::vector<std::string>& flags) const {
  if (!available()) return nullptr;
  auto process = std::make_unique<Process>(command(script, flags), environment());
  return process->answer() == "ready" ? std::move(process) : nullptr;
}

// Large pages, and memory that is kept instead of given back and asked for again in each step.
const std::vector<std::string>& Torch::environment() {
  static const std::vector<std::string> variables = {
      "OMP_NUM_THREADS",
      "GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:"
      "glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=268435456"};
  return variables;
}

void rest() { std::this_thread::sleep_for(std::chrono::milliseconds(250)); }

}  // namespace crossply
