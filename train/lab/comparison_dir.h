// The directory of a comparison, which one process holds at a time.
#pragma once

#include <string>

#include "engine/io/file.h"

namespace crossply {

class ComparisonDir {
 public:
  ComparisonDir() = default;
  ComparisonDir(ComparisonDir&& other) noexcept = default;
  ComparisonDir& operator=(ComparisonDir&& other) noexcept = default;
  ~ComparisonDir();  // removes a directory that this object created and nobody wrote to

  // Creates the directory if need be and locks it. Throws Exit::usage if another comparison still has it after three
  // seconds: the processes of a comparison that was killed take a moment to end.
  static ComparisonDir claim(const std::string& path);
  // The same for the first of PATH, PATH-2, PATH-3, ... that is empty and that nobody else holds.
  static ComparisonDir claim_fresh(const std::string& path);

  bool is_held() const { return lock_.get() >= 0; }
  const std::string& path() const { return path_; }

 private:
  bool try_lock(const std::string& path);
  std::string path_;
  Descriptor lock_;  // the processes of the runs inherit it
  bool created_ = false;
};

}  // namespace crossply
