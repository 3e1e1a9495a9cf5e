#include "cli/standard_streams.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "engine/io/file.h"
#include "engine/io/printable.h"

namespace crossply {
namespace {

bool reader_is_gone() {
  pollfd standard_output{STDOUT_FILENO, POLLOUT, 0};
  return ::poll(&standard_output, 1, 0) == 1 && (standard_output.revents & (POLLERR | POLLHUP)) != 0;
}

}  // namespace

void prepare_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    // open() takes the lowest free number, which is this one.
    if (::open("/dev/null", O_RDWR) != fd) std::_Exit(static_cast<int>(Exit::io));
  }
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);
}

void flush_standard_output() {
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (flushed) return;
  const int error = errno;
  if (reader_is_gone()) throw ReaderGone();
  // Where an earlier write failed its reason is lost. What was printed is cut there, and one more byte fails alike.
  const bool again = error == 0 && uninterrupted([] { return ::write(STDOUT_FILENO, "\n", 1); }) < 0;
  fail_io("write to", "standard output", error != 0 ? error : again ? errno : EIO);
}

void say_note(const std::string& text) { std::fprintf(stderr, "note: %s\n", printable(text).c_str()); }

bool takes_escape_codes(int fd) {
  const char* terminal = std::getenv("TERM");
  return ::isatty(fd) == 1 && terminal != nullptr && std::string_view(terminal) != "dumb" && *terminal != '\0';
}

}  // namespace crossply
