#include "cli/stop.h"

#include <csignal>
#include <initializer_list>

namespace crossply {
namespace {

volatile std::sig_atomic_t requested = 0;

void request_stop(int) { requested = 1; }

}  // namespace

void catch_stop_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    struct sigaction action;
    ::sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;
    action.sa_handler = request_stop;
    // A second one ends the process, for the impatient. But launchers repeat SIGUSR1, that of MPICH for each lost rank.
    action.sa_flags = signal == SIGUSR1 ? SA_RESTART : SA_RESTART | SA_RESETHAND;
    ::sigaction(signal, &action, nullptr);
  }
}

bool stop_requested() { return requested != 0; }

}  // namespace crossply
