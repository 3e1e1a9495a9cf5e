// Link: TCP as records of 64 bytes, which is all that the control plane ever sends. A text goes in front of its
// record, 56 bytes to a record, and is at most 1 MiB long; no other length, and no address, is taken from the network.
#pragma once

#include <sys/socket.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "engine/io/file.h"

namespace crossply {

using Numbers = std::array<int64_t, 7>;

struct Record {
  enum Kind : uint32_t { text = 1, hello, welcome, beat, stats, barrier, share, collect, finish, abort, reason };
  Kind kind;
  int32_t rank;  // of text: how many bytes
  Numbers number;
};
static_assert(sizeof(Record) == 64);

// A record with its text; an answer to all ranks' texts has as many.
struct Message {
  Record record;
  std::vector<std::string> texts;
};

class Link {
 public:
  static constexpr size_t max_text = 1 << 20;

  explicit Link(Descriptor socket = Descriptor());
  int fd() const { return socket_.get(); }
  bool is_open() const { return fd() >= 0; }
  void close() { socket_ = Descriptor(); }

  // These never wait. What cannot be sent now is kept for send_some().
  void post(const Record& record, const std::string& text = "");
  void send_some();
  bool has_unsent() const { return !out_.empty(); }
  // The next message if it is here whole, a wrong text as one of kind text. Closes if the other end has closed.
  std::optional<Message> receive();

  // The next message, if it comes within these seconds.
  std::optional<Message> wait(double seconds);

 private:
  Descriptor socket_;
  Record in_{};      // what comes,
  size_t here_ = 0;  // and how many bytes of it are here
  std::string text_, out_;
};

// A socket address, of whatever family.
struct Address {
  sockaddr_storage bytes{};
  socklen_t length = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
};
std::vector<Address> resolve(const std::string& host, const std::string& port);  // empty where nobody knows the host

// To "ADDRESS PORT"; closed, with errno, where that fails or takes longer than these seconds.
Link connect_to(const std::string& endpoint, int seconds);

double seconds_now();  // of a clock that nobody sets

}  // namespace crossply
