#include "ranks/rendezvous.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "engine/numbers.h"
#include "engine/platform.h"
#include "engine/rng.h"
#include "ranks/link.h"

namespace crossply {
namespace {

constexpr uint64_t max_meeting_bytes = 4096;

std::string setting_of(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// {"10.0.0.1", "4711"}
std::pair<std::string, std::string> name_of(Address address) {
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  ::getnameinfo(address.get(), address.length, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  return {host, port};
}

bool is_loopback(const std::string& host) { return host.starts_with("127.") || host == "::1"; }

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
    const std::string host = name_of(address).first;
    if (!is_loopback(host) && !host.starts_with("fe80:")) hosts.push_back(host);  // that one is of one cable only
  }
  ::freeifaddrs(list);
  return hosts;
}

// Where rank 0 listens. master: MASTER_ADDR, or "".
std::vector<std::string> hosts_of_leader(const World& world, const std::string& master) {
  const std::vector<std::string> given = {master.empty() ? "127.0.0.1" : master};
  if (world.local_size == world.size) return given;
  // Many a machine knows its own name as a loopback, where no other one reaches it.
  const std::vector<Address> known = resolve(given[0], "0");
  if (known.empty() || !is_loopback(name_of(known[0]).first)) return given;
  const std::vector<std::string> own = own_hosts();
  return own.empty() ? given : own;
}

Descriptor listen_at(Address& address) {
  Descriptor socket(open_socket(address.bytes.ss_family));
  never_block(socket.get());
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(socket.get(), address.get(), address.length) != 0 || ::listen(socket.get(), SOMAXCONN) != 0 ||
      ::getsockname(socket.get(), address.get(), &address.length) != 0)
    return Descriptor();
  return socket;
}

// The token, then an address a line.
std::string text_of(const RankZero& rank_zero) {
  std::string text = str(rank_zero.token[0], " ", rank_zero.token[1], "\n");
  for (const std::string& endpoint : rank_zero.addresses) text += endpoint + "\n";
  return text;
}

RankZero point_of(const std::string& text, const std::string& where) {
  RankZero rank_zero;
  std::istringstream in(text);
  in >> rank_zero.token[0] >> rank_zero.token[1] >> std::ws;
  for (std::string line; std::getline(in, line);) rank_zero.addresses.push_back(line);
  if (rank_zero.addresses.empty()) fail(Exit::bad_data, where, ": says neither where rank 0 is nor its token");
  return rank_zero;
}

std::array<int64_t, 2> random_token() {
  return {static_cast<int64_t>(system_random_bits()), static_cast<int64_t>(system_random_bits())};
}

// Nothing is secret here: it only keeps jobs apart that were given the same port.
std::array<int64_t, 2> token_of_job(std::string name) {
  for (const char* id : {"SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"})
    name += " " + setting_of(id);
  return {static_cast<int64_t>(stream_of(name)), static_cast<int64_t>(stream_of(name + "."))};
}

// Every rank has one connection to rank 0; the system's default is about a thousand.
void allow_connections(int ranks) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = std::max(limit.rlim_cur, std::min<rlim_t>(static_cast<rlim_t>(ranks) + 512, limit.rlim_max));
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

Rendezvous::Rendezvous(const World& world, const std::string& run_dir, Comm* mpi) : leads_(world.leads()) {
  const std::string host = setting_of("MASTER_ADDR"), port = setting_of("MASTER_PORT");
  const bool at_master = mpi == nullptr && !host.empty() && !port.empty() && setting_of("TORCHELASTIC_RUN_ID").empty();
  if (at_master) {
    if (const auto number = parse_integer(port); !number || *number < 1 || *number > 65535)
      fail(Exit::usage, "MASTER_PORT is \"", port, "\", not a port from 1 to 65535");
    rank_zero_ = {{host + " " + port}, token_of_job(host + " " + port)};
  } else if (mpi == nullptr) {
    if (run_dir.empty())
      fail(Exit::usage, "many ranks, and nowhere to meet: give --out, or set MASTER_ADDR and MASTER_PORT");
    file_ = run_dir + "/.meet";
  }
  if (leads_) listen(world, at_master ? host : "", at_master ? port : "0");
  if (mpi != nullptr) broadcast(*mpi);
  if (!leads_ || file_.empty()) return;
  const mode_t before = ::umask(077);  // whoever may read it may join
  write_file_atomically(file_, text_of(rank_zero_));
  ::umask(before);
}

void Rendezvous::listen(const World& world, const std::string& master, const std::string& port) {
  allow_connections(world.size);
  if (master.empty()) rank_zero_.token = random_token();
  rank_zero_.addresses.clear();
  int error = 0;
  for (const std::string& host : hosts_of_leader(world, master))
    for (Address& address : resolve(host, port)) {
      Descriptor socket = listen_at(address);
      if (socket.get() < 0) {
        error = errno;
        continue;
      }
      const auto [name, number] = name_of(address);
      rank_zero_.addresses.push_back(name + " " + number);
      listeners_.push_back(std::move(socket));
    }
  if (!listeners_.empty()) return;
  const std::string reason = error != 0 ? std::strerror(error) : "nobody knows that name";
  if (master.empty()) fail(Exit::device, "rank 0 cannot listen at any of this machine's addresses: ", reason);
  fail(Exit::usage, "rank 0 cannot listen at MASTER_ADDR ", master, ", MASTER_PORT ", port, ": ", reason,
       "; is that a name of its machine, and the port free?");
}

// Rank 0's point_ to all.
void Rendezvous::broadcast(Comm& mpi) {
  std::vector<int32_t> buffer(max_meeting_bytes / sizeof(int32_t));
  char* bytes = reinterpret_cast<char*>(buffer.data());
  const std::string text = text_of(rank_zero_);
  CHECK_THAT(text.size() < max_meeting_bytes, text.size(), " bytes of addresses");
  std::memcpy(bytes, text.data(), text.size());
  mpi.broadcast(view(buffer.data(), {static_cast<int64_t>(buffer.size())}), 0);
  mpi.wait(mpi.mark());
  bytes[max_meeting_bytes - 1] = '\0';
  rank_zero_ = point_of(bytes, "what rank 0 broadcast");
}

Rendezvous::~Rendezvous() {
  if (leads_ && !file_.empty()) ::unlink(file_.c_str());
}

RankZero Rendezvous::rank_zero() const {
  return leads_ || file_.empty() ? rank_zero_ : point_of(read_file(file_, max_meeting_bytes), file_);
}

}  // namespace crossply
