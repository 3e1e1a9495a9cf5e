#include "ranks/link.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine/platform.h"

namespace crossply {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Link::Link(Descriptor socket) : socket_(std::move(socket)) {
  const int on = 1;  // a record leaves at once
  ::setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  refuse_sigpipe(fd());
}

void Link::post(const Record& record, const std::string& text) {
  if (!is_open()) return;
  const auto append = [&](const Record& r) { out_.append(reinterpret_cast<const char*>(&r), sizeof r); };
  for (size_t i = 0; i < text.size(); i += sizeof(Numbers)) {
    const size_t bytes = std::min(sizeof(Numbers), text.size() - i);
    Record part{Record::text, static_cast<int32_t>(bytes), {}};
    std::memcpy(&part.number, text.data() + i, bytes);
    append(part);
  }
  append(record);
  send_some();
}

// An error is left to receive(), which meets it, too.
void Link::send_some() {
  while (!out_.empty()) {
    const auto send = [&] { return ::send(fd(), out_.data(), out_.size(), MSG_DONTWAIT | send_without_signal); };
    const ssize_t sent = uninterrupted(send);
    if (sent <= 0) return;
    out_.erase(0, static_cast<size_t>(sent));
  }
}

std::optional<Message> Link::receive() {
  while (is_open()) {
    char* rest = reinterpret_cast<char*>(&in_) + here_;
    const ssize_t n = uninterrupted([&] { return ::recv(fd(), rest, sizeof in_ - here_, MSG_DONTWAIT); });
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) return close(), std::nullopt;
    here_ = (here_ + static_cast<size_t>(n)) % sizeof in_;
    if (here_ > 0) continue;
    const bool fits = in_.rank > 0 && in_.rank <= static_cast<int>(sizeof(Numbers)) && text_.size() < max_text;
    if (in_.kind != Record::text || !fits) return Message{in_, {std::exchange(text_, "")}};
    text_.append(reinterpret_cast<const char*>(&in_.number), static_cast<size_t>(in_.rank));
  }
  return std::nullopt;
}

std::optional<Message> Link::wait(double seconds) {
  for (const double end = seconds_now() + seconds; is_open() && seconds_now() < end;) {
    if (auto message = receive()) return message;
    pollfd socket{fd(), POLLIN, 0};
    ::poll(&socket, 1, 100);
  }
  return std::nullopt;
}

std::vector<Address> resolve(const std::string& host, const std::string& port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (::getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return {};
  std::vector<Address> all;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    std::memcpy(&all.emplace_back().bytes, one->ai_addr, one->ai_addrlen);
    all.back().length = one->ai_addrlen;
  }
  ::freeaddrinfo(found);
  return all;
}

Link connect_to(const std::string& endpoint, int seconds) {
  const size_t space = endpoint.find(' ');
  for (Address& address : resolve(endpoint.substr(0, space), endpoint.substr(space + 1))) {
    Descriptor socket(open_socket(address.bytes.ss_family));
    const timeval limit{seconds, 0};
    ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // of connect(), too
    if (::connect(socket.get(), address.get(), address.length) == 0) return Link(std::move(socket));
  }
  if (errno == EINPROGRESS) errno = ETIMEDOUT;
  return Link();
}

}  // namespace crossply
