// The signals that ask a run to stop.
#pragma once

#include <string>

namespace crossply {

// From now on SIGINT, SIGTERM, SIGHUP and SIGUSR1 only ask to stop; a second one of a kind ends the program at once.
// What is ignored, as under nohup, stays ignored.
void catch_stop_signals();
bool stop_requested();

// For programs whose files are complete at any time: from now on the first of these signals says this line on stderr
// and exits with Exit::stopped. A later call has another line.
void exit_on_stop(const std::string& line);
// As long as one lives, that exit waits.
class HeldStop {
 public:
  HeldStop();
  ~HeldStop();
  HeldStop(const HeldStop&) = delete;
  HeldStop& operator=(const HeldStop&) = delete;
};

}  // namespace crossply
