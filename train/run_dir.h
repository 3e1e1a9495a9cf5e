// The directory of a training run: whether it may be used, and who holds it.
#pragma once

#include <string>

#include "engine/file.h"
#include "train/options.h"

namespace crossply {

// Nothing in a directory that somebody else filled is overwritten, and no run is continued by accident: throws
// Exit::usage unless --out is new or empty, or --resume continues a run that was started there.
void check_run_dir(const TrainOptions& options);

// A run directory, created, and held for this process; the system lets go of it when the process ends, however it ends.
class RunDir {
 public:
  explicit RunDir(const std::string& path);
  // Throws Exit::io if the name no longer leads to the directory: then what the run writes is lost.
  void check_present() const;

 private:
  std::string path_;
  Descriptor fd_;
};

// The checkpoint to continue from; "" to start at step 0, after the picture of earlier steps was set aside. Prints
// under o.label what it skips. Throws Exit::bad_data where there are checkpoints but none is valid, and Exit::usage
// where the run that is continued at step 0 was started with other settings.
std::string find_checkpoint(const TrainOptions& o);

}  // namespace crossply
