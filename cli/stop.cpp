#include "cli/stop.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "engine/check.h"

namespace crossply {
namespace {

volatile std::sig_atomic_t requested = 0;

void request_stop(int) { requested = 1; }

volatile std::sig_atomic_t held = 0, requested_exit = 0;
// What the handler reads is never written: a new line is in the other half.
char last_words[2][4096];
volatile std::sig_atomic_t which_words = 0;

void exit_stopped() {
  const char* words = last_words[which_words];
  [[maybe_unused]] const auto said = ::write(STDERR_FILENO, words, std::strlen(words));
  ::_exit(static_cast<int>(Exit::stopped));
}

void exit_or_wait(int) {
  requested_exit = 1;
  if (held == 0) exit_stopped();
}

void on_stop(void (*handler)(int)) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    struct sigaction action;
    ::sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;
    action.sa_handler = handler;
    // A second one ends the process, for the impatient. But launchers repeat SIGUSR1, that of MPICH for each lost rank.
    action.sa_flags = signal == SIGUSR1 ? SA_RESTART : SA_RESTART | SA_RESETHAND;
    ::sigaction(signal, &action, nullptr);
  }
}

}  // namespace

void catch_stop_signals() { on_stop(request_stop); }

bool stop_requested() { return requested != 0; }

void exit_on_stop(const std::string& line) {
  const int other = 1 - which_words;
  std::snprintf(last_words[other], sizeof last_words[other], "%s\n", line.c_str());
  which_words = other;
  on_stop(exit_or_wait);
}

HeldStop::HeldStop() { held = held + 1; }
HeldStop::~HeldStop() {
  held = held - 1;
  if (held == 0 && requested_exit != 0) exit_stopped();
}

}  // namespace crossply
