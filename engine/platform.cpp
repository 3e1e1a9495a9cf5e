#include "engine/platform.h"

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#else
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

namespace crossply {

#ifdef __APPLE__

namespace {

int close_on_exec(int descriptor) {
  if (descriptor >= 0) ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return descriptor;
}

}  // namespace

timespec modified_time(const struct stat& status) { return status.st_mtimespec; }
timespec changed_time(const struct stat& status) { return status.st_ctimespec; }

bool exchange_paths(const std::string& a, const std::string& b) {
  return ::renamex_np(a.c_str(), b.c_str(), RENAME_SWAP) == 0;
}

int open_socket(int family) { return close_on_exec(::socket(family, SOCK_STREAM, 0)); }
int accept_connection(int listener) { return close_on_exec(::accept(listener, nullptr, nullptr)); }
bool open_pipe(int (&ends)[2]) {
  if (::pipe(ends) != 0) return false;
  for (const int end : ends) close_on_exec(end);
  return true;
}

void refuse_sigpipe(int socket) {
  const int on = 1;
  ::setsockopt(socket, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
}

void die_with_parent() {}

std::string own_program() {
  std::string path(4096, '\0');
  uint32_t size = static_cast<uint32_t>(path.size());
  return ::_NSGetExecutablePath(path.data(), &size) == 0 ? path.c_str() : "";
}

#else

timespec modified_time(const struct stat& status) { return status.st_mtim; }
timespec changed_time(const struct stat& status) { return status.st_ctim; }

bool exchange_paths(const std::string& a, const std::string& b) {
#ifdef __GLIBC__
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
#else
  constexpr unsigned exchange = 2;  // musl has neither the function nor the name
  return ::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), exchange) == 0;
#endif
}

int open_socket(int family) { return ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0); }
int accept_connection(int listener) { return ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC); }
bool open_pipe(int (&ends)[2]) { return ::pipe2(ends, O_CLOEXEC) == 0; }

void refuse_sigpipe(int) {}

void die_with_parent() { ::prctl(PR_SET_PDEATHSIG, SIGKILL); }

std::string own_program() {
  std::error_code unknown;
  return std::filesystem::read_symlink("/proc/self/exe", unknown).string();
}

#endif

void never_block(int descriptor) { ::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) | O_NONBLOCK); }

}  // namespace crossply
