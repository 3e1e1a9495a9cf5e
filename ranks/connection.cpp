#include "ranks/connection.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace crossply {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Connection::Connection(Descriptor socket) : socket_(std::move(socket)) {
  const int on = 1;  // a record leaves at once
  if (is_open()) ::setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void Connection::post(const Record& record, const std::string& text) {
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
void Connection::send_some() {
  size_t sent = 0;
  for (ssize_t n = 1; n > 0 && sent < out_.size();) {
    const auto send = [&] { return ::send(fd(), &out_[sent], out_.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL); };
    n = uninterrupted(send);
    if (n > 0) sent += static_cast<size_t>(n);
  }
  out_.erase(0, sent);
}

bool Connection::receive(size_t most) {
  char bytes[1 << 14];
  const ssize_t n = uninterrupted([&] { return ::recv(fd(), bytes, std::min(most, sizeof bytes), MSG_DONTWAIT); });
  if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  in_.erase(0, std::exchange(taken_, 0));
  in_.append(bytes, static_cast<size_t>(n));
  return true;
}

std::optional<Message> Connection::next() {
  for (Record record; is_open() && in_.size() - taken_ >= sizeof record;) {
    std::memcpy(&record, &in_[taken_], sizeof record);
    taken_ += sizeof record;
    const bool is_part = record.kind == Record::text && record.rank > 0 &&
                         record.rank <= static_cast<int>(sizeof(Numbers)) && text_.size() <= most_text;
    if (!is_part) return Message{record, {std::exchange(text_, "")}};
    text_.append(reinterpret_cast<const char*>(&record.number), static_cast<size_t>(record.rank));
  }
  return std::nullopt;
}

// Not a byte more, for which nobody would look before others come.
std::optional<Message> Connection::wait_for_first(double seconds) {
  for (const double end = seconds_now() + seconds; seconds_now() < end;) {
    if (auto message = next()) return message;
    pollfd wait{fd(), POLLIN, 0};
    ::poll(&wait, 1, 100);
    if (!receive(sizeof(Record) - (in_.size() - taken_))) break;
  }
  return next();
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

Connection connect_to(const std::string& endpoint, double seconds) {
  const size_t space = endpoint.find(' ');
  if (space == endpoint.npos) return Connection();
  for (Address& address : resolve(endpoint.substr(0, space), endpoint.substr(space + 1))) {
    Descriptor socket(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (socket.get() < 0) continue;
    if (::connect(socket.get(), address.get(), address.length) == 0) return Connection(std::move(socket));
    if (errno != EINPROGRESS) continue;
    pollfd wait{socket.get(), POLLOUT, 0};
    int error = ETIMEDOUT;
    socklen_t length = sizeof error;
    if (uninterrupted([&] { return ::poll(&wait, 1, static_cast<int>(seconds * 1000)); }) > 0)
      ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error == 0) return Connection(std::move(socket));
    errno = error;
  }
  return Connection();
}

}  // namespace crossply
