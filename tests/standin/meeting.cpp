#include "tests/standin/meeting.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "engine/check.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

namespace crossply::standin {
namespace {

using Clock = std::chrono::steady_clock;
Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
}
[[noreturn]] void lose(const std::string& what) { throw Lost("stand-in for NCCL: " + what); }

sockaddr_un address_of(const std::string& folder, int rank) {
  const std::string path = folder + "/" + std::to_string(rank);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) lose("the path " + path + " is too long for a socket");
  std::memcpy(address.sun_path, path.c_str(), path.size());
  return address;
}

int listen_at(const sockaddr_un& address, int ranks) {
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 || listen(listener, ranks) != 0)
    lose(str("cannot listen at ", address.sun_path, ": ", std::strerror(errno), "; is this rank here twice?"));
  return listener;
}
int connect_to(const sockaddr_un& address, Clock::time_point until) {
  for (;;) {
    const int made = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(made, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return made;
    close(made);
    if (Clock::now() > until) lose(str("nobody listens at ", address.sun_path));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}
int accept_from(int listener, Clock::time_point until) {
  pollfd waits{listener, POLLIN, 0};
  while (poll(&waits, 1, 10) <= 0)
    if (Clock::now() > until) lose("not all ranks came to the meeting");
  return accept(listener, nullptr, nullptr);
}

// What is left of a transfer with one rank.
struct SpanCursor {
  std::byte* data;
  size_t left;
  explicit SpanCursor(const Span& span) : data(static_cast<std::byte*>(span.data)), left(span.bytes) {}
  void advance(size_t bytes) { data += bytes, left -= bytes; }
};

}  // namespace

std::string new_folder() {
  std::string name = (std::filesystem::temp_directory_path() / "standin.XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) lose("cannot make " + name + ": " + std::strerror(errno));
  return name;
}

// A rank listens for those above it and looks for those below, each of which it tells its number.
Mesh::Mesh(const std::string& folder, int rank, int ranks, double patience)
    : rank_(rank), sockets_(static_cast<size_t>(ranks), -1) {
  const auto until = after(patience);
  const sockaddr_un own = address_of(folder, rank);
  const int listener = listen_at(own, ranks);
  for (int other = 0; other < rank; ++other) {
    const int made = connect_to(address_of(folder, other), until);
    if (write(made, &rank, sizeof rank) != sizeof rank) lose("a rank hung up at the meeting");
    sockets_[static_cast<size_t>(other)] = made;
  }
  for (int others = rank + 1; others < ranks; ++others) {
    const int made = accept_from(listener, until);
    int other = 0;
    if (read(made, &other, sizeof other) != sizeof other) lose("a rank hung up at the meeting");
    if (other <= rank || other >= ranks) lose(str("rank ", other, " comes to a meeting of ", ranks));
    sockets_[static_cast<size_t>(other)] = made;
  }
  ::close(listener);
  unlink(own.sun_path);
  rmdir(folder.c_str());  // the last one's succeeds
  for (const int made : sockets_)
    if (made >= 0) fcntl(made, F_SETFL, O_NONBLOCK);
}

void Mesh::close() {
  for (int& made : sockets_)
    if (made >= 0) ::close(std::exchange(made, -1));
}

void Mesh::swap(const std::vector<Span>& out, const std::vector<Span>& in, double patience) {
  const auto until = after(patience);
  std::vector<SpanCursor> sending(out.begin(), out.end()), receiving(in.begin(), in.end());
  for (;;) {
    std::vector<pollfd> waits;
    std::vector<size_t> of;
    for (size_t r = 0; r < sockets_.size(); ++r) {
      if (static_cast<int>(r) == rank_) continue;
      const int events = (sending[r].left > 0 ? POLLOUT : 0) | (receiving[r].left > 0 ? POLLIN : 0);
      if (events == 0) continue;
      waits.push_back({sockets_[r], static_cast<short>(events), 0});
      of.push_back(r);
    }
    if (waits.empty()) return;
    if (poll(waits.data(), waits.size(), 100) < 0 && errno != EINTR) lose(std::strerror(errno));
    if (Clock::now() > until) lose(str("rank ", of[0], " does not come to a transfer"));
    for (size_t i = 0; i < waits.size(); ++i) {
      const size_t r = of[i];
      if (waits[i].revents & (POLLOUT | POLLERR) && sending[r].left > 0) {
        const ssize_t n = send(sockets_[r], sending[r].data, sending[r].left, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR && receiving[r].left == 0) lose(str("rank ", r, " is gone"));
        if (n > 0) sending[r].advance(static_cast<size_t>(n));
      }
      if (waits[i].revents & (POLLIN | POLLHUP) && receiving[r].left > 0) {
        const ssize_t n = recv(sockets_[r], receiving[r].data, receiving[r].left, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) lose(str("rank ", r, " is gone"));
        if (n > 0) receiving[r].advance(static_cast<size_t>(n));
      }
    }
  }
}

}  // namespace crossply::standin
