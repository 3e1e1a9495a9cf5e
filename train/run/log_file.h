// A file that grows while a run goes on, and that others read meanwhile.
#pragma once

#include <string>

#include "engine/io/file.h"

namespace crossply {

class LogFile {
 public:
  LogFile() = default;  // none yet
  // Goes on after what the file has. create: it must not be there yet. Throws Exit::io.
  explicit LogFile(const std::string& path, bool create = false);
  // Reaches the system before it returns. Exit::io if that fails or if the file was removed.
  void append(const std::string& bytes);
  // Makes what was written durable.
  void sync() const;

 private:
  std::string path_;
  Descriptor file_;
};

}  // namespace crossply
