#include "data/python_script.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "cli/stop.h"
#include "engine/io/python_files.h"
#include "engine/io/python_program.h"
#include "engine/platform.h"

namespace crossply {
namespace {

// In the child: becomes the program.
[[noreturn]] void run_script(char* const* argv, ScriptEnd end, int pipe, int report, pid_t parent) {
  if (end == ScriptEnd::input) die_with_parent();
  if (::getppid() != parent) ::_exit(127);  // it ended before
  const int standard = end == ScriptEnd::input ? STDIN_FILENO : STDOUT_FILENO;
  if (pipe == standard) ::fcntl(pipe, F_SETFD, 0);
  else ::dup2(pipe, standard);
  ::execvp(argv[0], argv);
  const int error = errno;
  if (::write(report, &error, sizeof error) < 0) ::_exit(126);
  ::_exit(127);
}

}  // namespace

void make_pipe(Descriptor& read, Descriptor& write) {
  int ends[2];
  if (!open_pipe(ends)) fail_io("make", "a pipe", errno);
  read = Descriptor(ends[0]), write = Descriptor(ends[1]);
}

pid_t start_script(const std::string& name, const std::vector<std::string>& arguments, ScriptEnd end, int pipe) {
  clean_python_path();
  std::vector<std::string> words = {python_program(), "-c", python_files().at(name)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  Descriptor answer, report;
  make_pipe(answer, report);
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid < 0) fail_io("start", words[0], errno);
  if (pid == 0) run_script(argv.data(), end, pipe, report.get(), parent);
  report = Descriptor();
  int error = 0;  // of exec; the pipe ends without one where it succeeds
  const ssize_t got = uninterrupted([&] { return ::read(answer.get(), &error, sizeof error); });
  if (got <= 0) return pid;
  ::waitpid(pid, nullptr, 0);
  if (error != ENOENT) fail_io("start", words[0], error);
  return 0;
}

int wait_for_script(pid_t pid) {
  constexpr int patience = 100;
  int status = 0;
  for (int asked = 0; ::waitpid(pid, &status, WNOHANG) == 0;) {
    if (stop_requested()) ::kill(pid, asked++ < patience ? SIGTERM : SIGKILL);
    ::poll(nullptr, 0, 20);
  }
  return status;
}

std::string script_status(int status) {
  return WIFSIGNALED(status) ? str("signal ", WTERMSIG(status)) : str("exit code ", WEXITSTATUS(status));
}

}  // namespace crossply
