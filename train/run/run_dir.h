// The directory of a training run: whether it may be used, and who holds it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "ranks/process_group.h"
#include "train/settings/settings.h"

namespace crossply {

// Nothing in a directory that somebody else filled is overwritten, and no run is continued by accident: throws
// Exit::usage unless --out is new or empty, or --resume continues a run that was started there. Of several ranks only
// the first looks: it may have begun to fill the directory.
void check_run_dir(const Settings& settings, const World& world = {});

// A run directory, created, and held for this job; the system lets go of it when the process ends, however it ends. Of
// several ranks the first creates and holds it.
class RunDir {
 public:
  explicit RunDir(const std::string& path, const World& world = {});
  // Leaves a number in it that is this job's, and that every rank must find in `patience` seconds, for which a network
  // file system may hide it; else Exit::no_input. One rank only removes another job's.
  void mark(std::shared_ptr<ProcessGroup> ranks, double patience = 90);
  // That the directory is held for; since mark().
  const std::shared_ptr<ProcessGroup>& group() const { return group_; }
  // Throws Exit::io if the name no longer leads to the directory: then what the run writes is lost.
  void check_present() const;
  // Throws Exit::io if it has another job's number: to a job that was cut off and did not end it belongs no longer.
  // Of rank 0.
  void check_mine() const;

 private:
  void open();
  std::string path_, mark_;
  Descriptor fd_;
  std::shared_ptr<ProcessGroup> group_;
};

std::string step_dir(const std::string& run_dir, int64_t step);
// The steps of the run's checkpoints, newest first. Throws what model_dirs_in() throws.
std::vector<int64_t> checkpoint_steps(const std::string& run_dir);
// "800, 900"; "none".
std::string list_of(const std::vector<int64_t>& steps);
// flags.json. Without it nothing else in the directory could be resumed.
void write_run_settings(const Settings& settings);

// The checkpoint to continue from, chosen by rank 0 for all; "" to start at step 0, after the picture of earlier steps
// was set aside. That of --branch is copied first. Prints under the label what it skips. Throws Exit::bad_data where
// there are checkpoints but none is valid, and Exit::usage where the run that is continued at step 0 was started with
// other settings.
std::string find_checkpoint(const Settings& settings, const RunDir& dir);

}  // namespace crossply
