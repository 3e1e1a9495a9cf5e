// The signals that ask a run to stop.
#pragma once

namespace crossply {

// From now on SIGINT, SIGTERM, SIGHUP and SIGUSR1 only ask to stop; a second one of a kind ends the program at once.
// What is ignored, as under nohup, stays ignored.
void catch_stop_signals();
bool stop_requested();

}  // namespace crossply
