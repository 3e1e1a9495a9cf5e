// What differs between Linux (glibc, musl) and macOS, under one name each. The rest of the tree calls POSIX.
#pragma once

#include <sys/socket.h>
#include <sys/stat.h>

#include <string>

extern "C" char** environ;  // of POSIX, but in no header of macOS

namespace crossply {

timespec modified_time(const struct stat& status);
timespec changed_time(const struct stat& status);

// Two paths change places in one step. False, with errno, where the file system cannot do that.
bool exchange_paths(const std::string& a, const std::string& b);

// Close-on-exec, like every descriptor of ours; -1, with errno, on failure.
int open_socket(int family);
int accept_connection(int listener);
bool open_pipe(int (&ends)[2]);
void never_block(int descriptor);

// A connection that the other side has closed must not end this process by SIGPIPE: an option of each socket on macOS,
// a flag of each send() elsewhere.
void refuse_sigpipe(int socket);
#ifdef MSG_NOSIGNAL
constexpr int send_without_signal = MSG_NOSIGNAL;
#else
constexpr int send_without_signal = 0;
#endif

// From here on this process is killed when its parent dies. Linux only: elsewhere it may outlive its parent.
void die_with_parent();

// The file of the running program; empty if the system does not say.
std::string own_program();

}  // namespace crossply
