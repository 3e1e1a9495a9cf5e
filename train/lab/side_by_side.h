// The runs of a comparison: one after the other in this process, or several at a time, each in a process of its own,
// because a run takes its process's threads. Neither the one nor the number of threads changes a bit of a run.
#pragma once

#include <functional>
#include <string>

#include "train/lab/comparison.h"

namespace crossply {

// How many runs at a time, and a line about it; "" where there is nothing to say.
struct Jobs {
  int64_t count = 1;
  std::string reason;
};
// asked: --jobs; the line then warns where the memory is too small. 0: as many as there are threads and memory for, of
// several seeds or rates, on a CPU, where the first model is so small that as many steps side by side, of one thread
// each, are a tenth faster than one after the other with all threads; both are timed for a moment. Otherwise one.
Jobs choose_jobs(const Comparison& comparison, int64_t asked);

// Trains all runs that are needed until none is left, but for those that other processes have, or a signal asks to
// stop.
// After each run it writes records and results, an error of which does not end the runs. Returns the error of the last
// such attempt; "" where all is written.
std::string train_all(Comparison& comparison, int64_t jobs);

// The child's part: trains the run that `request`, a JSON text, describes, and answers on descriptor 3.
Exit train_for_parent(const std::string& request);

}  // namespace crossply
