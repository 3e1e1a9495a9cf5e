#include "ranks/meeting.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>

#include "engine/json.h"
#include "engine/numbers.h"
#include "engine/rng.h"
#include "ranks/connection.h"

namespace crossply {
namespace {

constexpr uint64_t most_meeting_bytes = 4096;

std::string setting_of(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// "10.0.0.1 4711"
std::string endpoint_of(Address address) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (::getnameinfo(address.get(), address.length, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "";
  return str(host, " ", port);
}

bool is_loopback(const Address& address) {
  if (address.bytes.ss_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&address.bytes)->sin6_addr);
  return ntohl(reinterpret_cast<const sockaddr_in*>(&address.bytes)->sin_addr.s_addr) >> 24 == 127;
}

// The numeric addresses that other machines may know this one by; at most 16.
std::vector<std::string> own_hosts() {
  std::vector<std::string> hosts;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return hosts;
  for (const ifaddrs* one = list; one != nullptr && hosts.size() < 16; one = one->ifa_next) {
    const int family = one->ifa_addr == nullptr ? AF_UNSPEC : one->ifa_addr->sa_family;
    if ((one->ifa_flags & IFF_UP) == 0 || (family != AF_INET && family != AF_INET6)) continue;
    Address address;
    address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.bytes, one->ifa_addr, address.length);
    const std::string endpoint = endpoint_of(address), host = endpoint.substr(0, endpoint.find(' '));
    if (is_loopback(address) || host.empty() || host.starts_with("fe80:")) continue;  // of one link: needs its name
    hosts.push_back(host);
  }
  ::freeifaddrs(list);
  return hosts;
}

Descriptor listen_at(Address address) {
  Descriptor socket(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (socket.get() < 0 || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      ::bind(socket.get(), address.get(), address.length) != 0 || ::listen(socket.get(), SOMAXCONN) != 0)
    return Descriptor();
  return socket;
}

std::string text_of(const MeetingPoint& point) {
  return nlohmann::json({{"endpoints", point.endpoints}, {"token", point.token}, {"time", std::time(nullptr)}}).dump();
}

MeetingPoint point_of(const std::string& text, const std::string& where) {
  const auto json = parse_json(text, where);
  const auto endpoints = json.is_object() ? json.value("endpoints", nlohmann::json()) : nlohmann::json();
  const auto token = json.is_object() ? json.value("token", nlohmann::json()) : nlohmann::json();
  const auto is_text = [](const auto& value) { return value.is_string(); };
  if (!endpoints.is_array() || !std::all_of(endpoints.begin(), endpoints.end(), is_text) || !token.is_array() ||
      token.size() != 2 || !holds<int64_t>(token[0]) || !holds<int64_t>(token[1]))
    fail(Exit::bad_data, where, ": says neither where rank 0 is nor its token");
  return {endpoints.get<std::vector<std::string>>(), {token[0].get<int64_t>(), token[1].get<int64_t>()}};
}

// For its owner only from the first moment on: whoever has the token may join.
void write_secret(const std::string& path, const std::string& text) {
  const std::string temporary = temporary_sibling(path);
  ::unlink(temporary.c_str());
  const Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (file.get() < 0 || ::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
      ::fsync(file.get()) != 0 || ::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    fail_io("write", path, error);
  }
}

// Every rank has one connection to rank 0; the system's default is about a thousand.
void allow_connections(int ranks) {
  rlimit limit{};
  const rlim_t wanted = static_cast<rlim_t>(ranks) + 512;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

void Meeting::listen_on_own_addresses(const Place& place, const std::string& port) {
  std::vector<std::string> hosts;
  if (place.local_size < place.size) hosts = own_hosts();
  if (hosts.empty()) hosts = {"127.0.0.1"};
  point_.endpoints.clear();
  for (const std::string& host : hosts)
    for (Address& address : resolve(host, port)) {
      Descriptor socket = listen_at(address);
      if (socket.get() < 0 || ::getsockname(socket.get(), address.get(), &address.length) != 0) continue;
      point_.endpoints.push_back(endpoint_of(address));
      listeners_.push_back(std::move(socket));
    }
  if (listeners_.empty())
    fail(Exit::device, "rank 0 cannot listen at any of this machine's addresses: ", std::strerror(errno));
}

void Meeting::meet_at_master(const Place& place, const std::string& host, const std::string& port) {
  if (const auto number = parse_integer(port); !number || *number < 1 || *number > 65535)
    fail(Exit::usage, "MASTER_PORT is \"", port, "\", not a port from 1 to 65535");
  // Nothing is secret here: the token only keeps jobs apart that were given the same port.
  std::string job = host + " " + port;
  for (const char* id : {"SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"})
    job += " " + setting_of(id);
  point_.endpoints = {host + " " + port};
  point_.token = {static_cast<int64_t>(stream_of(job)), static_cast<int64_t>(stream_of(job + "."))};
  if (!leads_) return;
  const std::vector<Address> addresses = resolve(host, port);
  if (addresses.empty()) fail(Exit::usage, "MASTER_ADDR is \"", host, "\", which no name service knows");
  // Many a machine knows its own name as a loopback, where no other one reaches it.
  if (is_loopback(addresses[0]) && place.local_size < place.size) return listen_on_own_addresses(place, port);
  for (const Address& address : addresses)
    if (Descriptor socket = listen_at(address); socket.get() >= 0) listeners_.push_back(std::move(socket));
  if (listeners_.empty())
    fail(Exit::usage, "rank 0 cannot listen at MASTER_ADDR ", host, ", MASTER_PORT ", port, ": ", std::strerror(errno),
         "; is it on that machine, and the port free?");
}

Meeting::Meeting(const Place& place, const std::string& run_dir, Comm* mpi) : leads_(place.leads()) {
  const std::string host = setting_of("MASTER_ADDR"), port = setting_of("MASTER_PORT");
  const bool at_master = !host.empty() && !port.empty() && setting_of("TORCHELASTIC_RUN_ID").empty();
  if (leads_) allow_connections(place.size);
  if (mpi == nullptr && at_master) {
    meet_at_master(place, host, port);
    return;
  }
  if (mpi == nullptr) {
    if (run_dir.empty())
      fail(Exit::usage, "many ranks, and nowhere to meet: give --out, or set MASTER_ADDR and MASTER_PORT");
    file_ = run_dir + "/.meet";
  }
  if (leads_) {
    std::random_device random;
    for (int64_t& half : point_.token) half = static_cast<int64_t>(uint64_t{random()} << 32 | random());
    listen_on_own_addresses(place, "0");
    if (mpi == nullptr) write_secret(file_, text_of(point_));
  }
  if (mpi != nullptr) broadcast(*mpi);
}

// Rank 0's point_ to all.
void Meeting::broadcast(Comm& mpi) {
  std::vector<int32_t> buffer(most_meeting_bytes / sizeof(int32_t));
  char* bytes = reinterpret_cast<char*>(buffer.data());
  const std::string text = text_of(point_);
  CHECK_THAT(text.size() < most_meeting_bytes, text.size(), " bytes of addresses");
  std::memcpy(bytes, text.c_str(), text.size() + 1);
  mpi.broadcast(view(buffer.data(), {static_cast<int64_t>(buffer.size())}), 0);
  mpi.wait(mpi.mark());
  bytes[most_meeting_bytes - 1] = '\0';
  point_ = point_of(bytes, "what rank 0 broadcast");
}

Meeting::~Meeting() {
  if (leads_ && !file_.empty()) ::unlink(file_.c_str());
}

MeetingPoint Meeting::look() const {
  return leads_ || file_.empty() ? point_ : point_of(read_file(file_, most_meeting_bytes), file_);
}

}  // namespace crossply
