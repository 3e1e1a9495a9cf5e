#include "train/stop.h"

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
    action.sa_flags = SA_RESTART | SA_RESETHAND;
    ::sigaction(signal, &action, nullptr);
  }
}

bool stop_requested() { return requested != 0; }

}  // namespace crossply
