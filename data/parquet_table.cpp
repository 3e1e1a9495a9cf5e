#include "data/parquet_table.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "cli/stop.h"
#include "data/python_script.h"
#include "engine/io/python_program.h"

namespace crossply {

ParquetTable::ParquetTable(const std::string& path, const std::string& column, const std::string& format)
    : path_(path), format_(format), size_(InputFile(path).size()) {
  Descriptor theirs;
  make_pipe(pipe_, theirs);
  pid_ = start_script("parquet_text.py", {path, column}, ScriptEnd::output, theirs.get());
  if (pid_ == 0)
    fail(Exit::bad_data, path_, ": ", format_, "; or install Python with pyarrow (there is no program ",
         python_program(), "), and it is read as it is");
}

ParquetTable::~ParquetTable() {
  if (pid_ == 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

size_t ParquetTable::read(char* out, size_t bytes) {
  size_t done = 0;
  while (done < bytes && pid_ != 0) {
    pollfd one{pipe_.get(), POLLIN, 0};
    if (stop_requested()) fail(Exit::stopped, "stopped while reading ", path_);
    if (::poll(&one, 1, 100) <= 0) continue;
    const ssize_t n = uninterrupted([&] { return ::read(pipe_.get(), out + done, bytes - done); });
    if (n < 0) fail_io("read", path_, errno);
    if (n == 0) finish();
    done += static_cast<size_t>(n), taken_ += static_cast<uint64_t>(n);
  }
  return done;
}

void ParquetTable::finish() {
  const int status = wait_for_script(pid_);
  pid_ = 0;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  if (stop_requested()) fail(Exit::stopped, "stopped while reading ", path_);
  if (WIFEXITED(status) && WEXITSTATUS(status) == no_package)
    fail(Exit::bad_data, path_, ": ", format_, "; or give ", python_program(),
         " pyarrow (pip install pyarrow, or another Python in the variable PYTHON), and it is read as it is");
  fail(Exit::bad_data, path_, ": ", python_program(), " did not read this Parquet table to its end (",
       script_status(status), "); what it says stands above");
}

}  // namespace crossply
