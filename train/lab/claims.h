// Which process of several, on one machine, trains which run of a comparison that they share.
#pragma once

#include <map>
#include <string>

#include "engine/io/file.h"

namespace crossply {

// A run's claim is the lock of an empty file of its name, which ends with the process that has it, however that ends,
// and with the process that trains the run for it. A file system without locks behaves as if no other process had one.
class Claims {
 public:
  explicit Claims(std::string directory) : directory_(std::move(directory)) {}
  // Whether the run is this process's now. Throws Exit::io where its file cannot be created.
  bool take(const std::string& run);
  // For the process that trains the run: the lock lasts until that, too, has ended. The run's claim must be held.
  int descriptor(const std::string& run) const { return held_.at(run).get(); }
  void give_back(const std::string& run) { held_.erase(run); }
  // Whether another process has it.
  bool is_elsewhere(const std::string& run);

 private:
  std::string directory_;
  std::map<std::string, Descriptor> held_;
};

}  // namespace crossply
