// The control plane: processes that join, speak and end, over the loopback. Nothing of MPI or of training is in it.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>

#include "engine/io/json.h"
#include "ranks/control.h"
#include "tests/ranks/crowd.h"
#include "train/step/fault.h"

namespace crossply {
namespace {

using namespace test;

// In a child doctest's macros would be lost.
#define NEED(condition)                                                                           \
  do {                                                                                            \
    if (!(condition)) fail(Exit::internal, __FILE__, ":", __LINE__, ": " #condition " is false"); \
  } while (0)

World here(int rank, int size) { return {rank, size, rank, size}; }

JoinOptions options_of(const Crowd& crowd) {
  JoinOptions options;
  options.run_dir = crowd.dir();
  options.same = {{"build", "abc"}, {"flags", "--seed 1"}};
  options.data = "123";
  return options;
}

// Memory that the children share with the test.
template <class T>
struct Shared {
  T* const value;
  Shared()
      : value(static_cast<T*>(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    REQUIRE(value != MAP_FAILED);
    new (value) T();
  }
  ~Shared() { ::munmap(value, sizeof(T)); }
  T* operator->() const { return value; }
};
using Steps = Shared<std::array<std::atomic<int64_t>, 8>>;  // by rank

// Steps whose statistics are reduced, until a rank dies or `last`; a rank that fails aborts, as a trainer does.
int train_like(int rank, int size, const JoinOptions& options, const Steps& steps, int64_t last = 1'000'000) {
  const auto group = join_group(here(rank, size), options, nullptr);
  try {
    for (int64_t step = 0; step < last; ++step) {
      group->enter(Stage::step, step);
      (void)inject_fault(group->world, step);
      group->start_stats({step, 64 * step, 9 * step, 100, false, 0.001});
      group->finish_stats();
      ++(*steps.value)[static_cast<size_t>(rank)];
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    group->finish();
    return 0;
  } catch (const Error& error) {
    ::dprintf(STDERR_FILENO, "%s\n", error.what());
    group->abort(error.code, error.what());
    ::_exit(static_cast<int>(error.code));
  }
}

// A crowd of ranks in the middle of their steps.
struct Training {
  Crowd crowd;
  Steps steps;
  JoinOptions options = options_of(crowd);

  void begin(int size) {
    for (int rank = 0; rank < size; ++rank)
      crowd.start(rank, [=, this] { return train_like(rank, size, options, steps); });
    for (int rank = 0; rank < size; ++rank)
      REQUIRE(wait_until([&] { return (*steps.value)[static_cast<size_t>(rank)] > 3; }, 20));
  }
  nlohmann::json last_exit() const {
    return parse_json(read_text(options.run_dir + "/last_exit.json"), "last_exit.json");
  }
};

int speak(const World& world, const JoinOptions& options, Comm* mpi) {
  const auto [rank, size, local_rank, local_size] = world;
  const auto group = join_group(world, options, mpi);
  for (int64_t step = 0; step < 50; ++step) {
    group->enter(Stage::step, step);
    group->start_stats({step, 8 * step, 3 * step, 10 + rank, step == 7 && rank == 2, 0.5 + 0.25 * (rank ^ 1)});
    const StepStats stats = group->finish_stats();
    NEED(stats.scored == 10 * size + size * (size - 1) / 2);
    NEED(stats.stop == (step == 7));
    NEED(stats.slowest == 2 && stats.min_busy == 0.5 && stats.median_busy == 0.75 && stats.max_busy == 1.25);
  }
  std::string text(300'000, ' ');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7 + i / 251);
  NEED(group->share(rank == 0 ? text : "not this") == text);
  NEED(group->share("") == "");
  const auto all = group->collect(text.substr(0, 1000 * static_cast<size_t>(rank)));
  NEED(all.size() == static_cast<size_t>(rank == 0 ? size : 0));
  for (size_t r = 0; r < all.size(); ++r) NEED(all[r] == text.substr(0, 1000 * r));
  group->start_stats({50, 0, 0, 1, false, 0});  // answered after what is asked behind it
  group->barrier("between");
  NEED(group->finish_stats().scored == size);
  group->finish();
  return 0;
}

TEST_CASE("control: four ranks meet in a file, vote, share, collect, and end together") {
  Crowd crowd;
  const JoinOptions options = options_of(crowd);
  for (int rank : {3, 1, 0, 2}) crowd.start(rank, [&, rank] { return speak(here(rank, 4), options, nullptr); });
  REQUIRE(wait_until([&] { return ::access((crowd.dir() + "/.meet").c_str(), F_OK) == 0 || crowd.code_of(0, 0) >= 0; },
                     20));
  crowd.check_all(4, Exit::done);
  CHECK(::access((crowd.dir() + "/.meet").c_str(), F_OK) != 0);
}

// Broadcasts through memory that forked processes share.
struct SharedMemoryComm : Comm {
  struct Board {
    std::atomic<bool> written{false};
    char bytes[1 << 16];
  };
  Shared<Board> board;
  int rank = 0;
  std::string describe() const override { return "shared memory"; }
  void exchange(const Tensor&, const Tensor&) override {}
  void gather(const Tensor&) override {}
  void reduce_scatter(const Tensor&) override {}
  void route(const std::vector<Piece>&, const std::vector<Piece>&) override {}
  void broadcast(const Tensor& whole, int root) override {
    if (rank == root) std::memcpy(board->bytes, whole.data, whole.bytes()), board->written = true;
    while (!board->written) std::this_thread::yield();
    std::memcpy(whole.data, board->bytes, whole.bytes());
  }
  Ticket mark() override { return 0; }
  void wait(Ticket) override {}
};

TEST_CASE("control: ranks meet over MPI's broadcast, and at MASTER_ADDR") {
  SharedMemoryComm comm;
  Crowd crowd;
  JoinOptions options = options_of(crowd);
  options.run_dir = "";
  for (int rank = 0; rank < 4; ++rank)
    crowd.start(rank, [&, rank] {
      comm.rank = rank;
      return speak(here(rank, 4), options, &comm);
    });
  crowd.check_all(4, Exit::done);
  // A port that is free now, most likely still is in a moment.
  const std::string port = std::to_string(20000 + ::getpid() % 10000);
  for (int rank = 0; rank < 4; ++rank)
    crowd.start(10 + rank, [&, rank] {
      ::setenv("MASTER_ADDR", "localhost", 1), ::setenv("MASTER_PORT", port.c_str(), 1);
      return speak(here(rank, 4), options, nullptr);
    });
  for (int rank = 0; rank < 4; ++rank) crowd.check(10 + rank, Exit::done);
}

TEST_CASE("control: ranks on other machines find rank 0 at its own addresses") {
  Crowd crowd;
  const JoinOptions options = options_of(crowd);
  for (int rank = 0; rank < 4; ++rank)
    crowd.start(rank, [&, rank] { return speak({rank, 4, 0, 1}, options, nullptr); });
  crowd.check_all(4, Exit::done);
}

TEST_CASE("control: many short jobs end without a false alarm") {
  for (int round = 0; round < 30; ++round) {
    Training t;
    for (int rank = 0; rank < 3; ++rank)
      t.crowd.start(rank, [&, rank] { return train_like(rank, 3, t.options, t.steps, round % 3); });
    t.crowd.check_all(3, Exit::done);
    CHECK(::access((t.crowd.dir() + "/last_exit.json").c_str(), F_OK) != 0);
  }
}

// All of `ranks`, each started as its own world says, end with this.
void check_refused(
    const std::vector<World>& worlds, Exit code, const std::string& says,
    const std::function<void(int, JoinOptions&)>& change = [](int, JoinOptions&) {}) {
  Crowd crowd;
  const JoinOptions common = options_of(crowd);
  for (size_t i = 0; i < worlds.size(); ++i)
    crowd.start(static_cast<int>(i), [&, i] {
      JoinOptions options = common;
      change(worlds[i].rank, options);
      join_group(worlds[i], options, nullptr);
      return 0;
    });
  for (size_t i = 0; i < worlds.size(); ++i) crowd.check(static_cast<int>(i), code, says);
}

TEST_CASE("control: ranks that do not belong together are refused, all with the reason") {
  SUBCASE("a rank twice") {
    check_refused({here(0, 4), here(1, 4), here(2, 4), here(2, 4)}, Exit::usage, "two processes are rank 2");
  }
  SUBCASE("a rank out of range") {
    // As of a program that does not check its own rank.
    Crowd crowd;
    const JoinOptions options = options_of(crowd);
    crowd.start(0, [&] { return join_group(here(0, 3), options, nullptr), 0; });
    crowd.start(1, [&] { return join_group(here(1, 3), options, nullptr), 0; });
    crowd.start(5, [&] {
      return Control(here(5, 3), options, nullptr).joined(), std::this_thread::sleep_for(std::chrono::seconds(20)), 0;
    });
    crowd.check(0, Exit::usage, "there is a rank 5 among 3 ranks");
    crowd.check(1, Exit::usage, "there is a rank 5 among 3 ranks");
    crowd.check(5, Exit::usage, "there is a rank 5 among 3 ranks");
  }
  SUBCASE("another number of ranks") {
    check_refused({here(0, 3), here(1, 3), here(2, 4)}, Exit::usage, "rank 2 is one of 4 ranks, rank 0 one of 3");
  }
  SUBCASE("other flags") {
    check_refused({here(0, 4), here(1, 4), here(2, 4), here(3, 4)}, Exit::usage,
                  "rank 1, 3: other flags than rank 0: \"--seed 2\", rank 0 has \"--seed 1\"",
                  [](int rank, JoinOptions& o) {
                    if (rank % 2 == 1) o.same["flags"] = "--seed 2";
                  });
  }
  SUBCASE("other data") {
    check_refused({here(0, 2), here(1, 2)}, Exit::bad_data, "rank 1: other data than rank 0",
                  [](int rank, JoinOptions& o) { o.data = rank == 1 ? "other" : "123"; });
  }
  SUBCASE("too few") {
    check_refused({here(0, 4), here(2, 4)}, Exit::device, "only 2 of 4 ranks; missing: 1, 3",
                  [](int rank, JoinOptions& o) { o.join_timeout = rank == 0 ? 0.5 : 20; });
  }
  SUBCASE("nobody there") {
    check_refused({here(1, 2)}, Exit::device, "rank 1 has not found rank 0 within 0.3 s: cannot open",
                  [](int, JoinOptions& o) { o.join_timeout = 0.3; });
  }
}

// Of the file that rank 0 has written: the token, then an address a line.
RankZero rank_zero_in(const std::string& file) {
  RankZero rank_zero;
  std::istringstream text(read_text(file));
  text >> rank_zero.token[0] >> rank_zero.token[1] >> std::ws;
  for (std::string endpoint; std::getline(text, endpoint);) rank_zero.addresses.push_back(endpoint);
  REQUIRE(!rank_zero.addresses.empty());
  return rank_zero;
}

Link connect_and_send(const std::string& endpoint, const void* bytes, size_t count) {
  Link socket = connect_to(endpoint, 5);
  REQUIRE(socket.is_open());
  REQUIRE(::send(socket.fd(), bytes, count, MSG_NOSIGNAL) == static_cast<ssize_t>(count));
  return socket;
}

TEST_CASE("control: strangers, half a hello and a file of the job before harm nobody") {
  Training t;
  const std::string meet = t.options.run_dir + "/.meet";
  write_text(meet, "1 2\n127.0.0.1 9\n");
  const auto train = [&](int rank) {
    t.crowd.start(rank, [&, rank] { return train_like(rank, 2, t.options, t.steps, 5); });
  };
  train(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  train(0);
  t.crowd.check(0, Exit::done), t.crowd.check(1, Exit::done);

  train(0);
  const auto listens = [&] { return ::access(meet.c_str(), F_OK) == 0; };
  REQUIRE(wait_until(listens, 20));
  struct stat status;
  REQUIRE(::stat(meet.c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0600);
  const std::string endpoint = rank_zero_in(meet).addresses[0];
  const std::string request(200, 'G');
  const Record wrong_token{Record::hello, 1, {0x63726F7373706C01, 1, 2, 2}};
  std::vector<Link> strangers;
  strangers.push_back(connect_and_send(endpoint, request.data(), request.size()));
  strangers.push_back(connect_and_send(endpoint, &wrong_token, sizeof wrong_token));
  strangers.push_back(connect_and_send(endpoint, &wrong_token, 20));
  for (const Link& stranger : strangers) {
    char answer;
    pollfd wait{stranger.fd(), POLLIN, 0};
    REQUIRE(::poll(&wait, 1, 5000) == 1);
    CHECK(::recv(stranger.fd(), &answer, 1, 0) <= 0);  // closed without a word
  }
  train(1);
  t.crowd.check(0, Exit::done), t.crowd.check(1, Exit::done);
}

TEST_CASE("control: a latecomer is told, and ends nothing") {
  Training t;
  t.begin(2);
  t.crowd.start(7, [&] { return join_group(here(1, 2), t.options, nullptr), 0; });
  t.crowd.check(7, Exit::usage, "two processes are rank 1");
  const int64_t steps = (*t.steps.value)[0];
  CHECK(wait_until([&] { return (*t.steps.value)[0] > steps + 10; }, 20));
  CHECK(t.crowd.code_of(0, 0) == -1);
}

TEST_CASE("control: a rank that sends what it must not is lost") {
  for (const Record& wrong : {Record{Record::text, 57, {}}, Record{Record::text, 0, {}}, Record{Record::reason, 0, {}},
                              Record{static_cast<Record::Kind>(99), 0, {}}, Record{Record::text, 56, {}}}) {
    CAPTURE(wrong.kind);
    Training t;
    t.crowd.start(0, [&] { return train_like(0, 2, t.options, t.steps, 5); });
    const std::string meet = t.options.run_dir + "/.meet";
    REQUIRE(wait_until([&] { return ::access(meet.c_str(), F_OK) == 0; }, 20));
    const RankZero rank_zero = rank_zero_in(meet);
    Link rank = connect_to(rank_zero.addresses[0], 5);
    rank.post({Record::hello, 1, {0x63726F7373706C01, rank_zero.token[0], rank_zero.token[1], 2}});
    REQUIRE(rank.wait(5)->record.kind == Record::welcome);
    // The last one is right, but not so often: a text is at most 1 MiB.
    for (size_t i = 0; i < Link::max_text / 56 + 3 && rank.is_open(); ++i) rank.post(wrong), rank.receive();
    for (int i = 0; i < 1000 && rank.has_unsent() && rank.is_open(); ++i)
      ::usleep(1000), rank.send_some(), rank.receive();
    t.crowd.check(0, Exit::peer_lost, str("rank 1 is lost in step 0: it sent a record of kind ", wrong.kind));
  }
}

TEST_CASE("control: ranks that disagree about the step are a bug that names them") {
  Crowd crowd;
  const JoinOptions options = options_of(crowd);
  for (int rank = 0; rank < 3; ++rank)
    crowd.start(rank, [&, rank] {
      const auto group = join_group(here(rank, 3), options, nullptr);
      group->start_stats({7, 64, rank == 1 ? 4 : 3, 1, false, 0});
      group->finish_stats();
      return 0;
    });
  crowd.check_all(
      3, Exit::internal,
      "rank 1 is at step 7, data position 64, 4 transfers, rank 0 at step 7, data position 64, 3 transfers");
}

TEST_CASE("control: a rank that is killed ends all others within a second") {
  for (const int victim : {2, 0}) {
    CAPTURE(victim);
    Training t;
    t.begin(4);
    const double killed = seconds_since_boot();
    t.crowd.signal(victim, SIGKILL);
    t.crowd.check_all(4, Exit::peer_lost, str("rank ", victim, " is lost"), victim);
    CHECK(seconds_since_boot() - killed < 1);
    const auto record = t.last_exit();
    CHECK(record["code"] == 76);
    CHECK(record["rank"] == victim);
    CHECK(has(record["why"], "its process has ended"));
    CHECK(record["step"].is_number_integer());
    CHECK(record["time"] > 1'000'000'000);
  }
}

TEST_CASE("control: a rank that is stopped is lost to the others, and sees it when it goes on") {
  for (const int victim : {1, 0}) {
    CAPTURE(victim);
    Training t;
    t.options.peer_timeout = 2;
    t.begin(3);
    t.crowd.signal(victim, SIGSTOP);
    ::usleep(300'000);  // no harm yet
    t.crowd.signal(victim, SIGCONT);
    const int64_t before = (*t.steps.value)[0];
    REQUIRE(wait_until([&] { return (*t.steps.value)[0] > before + 3; }, 20));
    t.crowd.signal(victim, SIGSTOP);
    const double stopped = seconds_since_boot();
    t.crowd.check_all(3, Exit::peer_lost, str("rank ", victim, " is lost"), victim);
    CHECK(seconds_since_boot() - stopped > 1.5);
    CHECK(seconds_since_boot() - stopped < 5);
    const int64_t steps = (*t.steps.value)[static_cast<size_t>(victim)];
    t.crowd.signal(victim, SIGCONT);
    t.crowd.check(victim, Exit::peer_lost, "stood still for");
    CHECK((*t.steps.value)[static_cast<size_t>(victim)] <= steps + 1);
  }
}

TEST_CASE("control: an error of one rank ends the others, who quote it") {
  for (const int victim : {2, 0}) {
    CAPTURE(victim);
    Training t;
    ::setenv("CROSSPLY_FAULT", str(victim, ":10:exit=74").c_str(), 1);
    t.crowd.keep_environment = true;
    t.begin(4);
    t.crowd.check(victim, Exit::io);
    t.crowd.check_all(4, Exit::peer_lost,
                      str("rank ", victim, " ended with code 74: CROSSPLY_FAULT: ", victim, ":10:exit=74"), victim);
    CHECK(t.last_exit()["code"] == 74);
    CHECK(t.last_exit()["rank"] == victim);
    CHECK(t.last_exit()["step"] == 10);
    ::unsetenv("CROSSPLY_FAULT");
  }
}

TEST_CASE("control: an error that all ranks find in the same step is each one's own") {
  for (const int late : {1, 0}) {
    CAPTURE(late);
    Training t;
    for (int rank = 0; rank < 4; ++rank)
      t.crowd.start(rank, [&, rank] {
        const auto group = join_group(here(rank, 4), t.options, nullptr);
        group->start_stats({0, 0, 0, 1, false, 0});
        group->finish_stats();
        if (rank == late) ::usleep(30'000);
        group->abort(Exit::not_finite, "the loss is nan");
        return 77;
      });
    t.crowd.check_all(4, Exit::not_finite);
    CHECK(t.last_exit()["code"] == 77);
  }
}

TEST_CASE("control: a transfer that fails because its peer is gone is that peer's loss") {
  Training t;
  for (int rank = 0; rank < 3; ++rank)
    t.crowd.start(rank, [&, rank] {
      const auto group = join_group(here(rank, 3), t.options, nullptr);
      ++(*t.steps.value)[static_cast<size_t>(rank)];
      while ((*t.steps.value)[7] == 0) ::usleep(1000);
      if (rank == 2) ::usleep(100'000), ::raise(SIGKILL);
      group->abort(Exit::device, "a transfer failed");  // as a library finds it first
      return 71;
    });
  for (size_t rank = 0; rank < 3; ++rank) REQUIRE(wait_until([&] { return (*t.steps.value)[rank] > 0; }, 20));
  (*t.steps.value)[7] = 1;
  t.crowd.check_all(2, Exit::peer_lost, "rank 2 is lost");
}

TEST_CASE("control: a rank that hangs, its watch thread alive, is named as the one furthest behind") {
  for (const int victim : {1, 0}) {
    CAPTURE(victim);
    Training t;
    ::setenv("CROSSPLY_FAULT", str(victim, ":10:hang").c_str(), 1);
    t.crowd.keep_environment = true;
    t.options.step_limit = 1;
    t.begin(3);
    t.crowd.check_all(3, Exit::peer_lost, str("in step 10, stage step; furthest behind: rank ", victim, ";"));
    CHECK(t.last_exit()["rank"] == victim);
    ::unsetenv("CROSSPLY_FAULT");
  }
}

// Of tests/system/cut_cable.sh, which starts it in two network namespaces, with RANK, MASTER_ADDR and MASTER_PORT.
TEST_CASE("one end of a cable that will be cut" * doctest::skip()) {
  const int rank = std::atoi(std::getenv("RANK"));
  JoinOptions options;
  options.peer_timeout = 3;
  const auto group = join_group({rank, 2, 0, 1}, options, nullptr);
  std::printf("joined\n"), std::fflush(stdout);
  for (int64_t step = 0; step < 60'000; ++step) {
    group->enter(Stage::step, step);
    group->barrier("again");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  FAIL("the cable was not cut");
}

TEST_CASE("control: a job of one rank waits for nobody") {
  const auto group = one_rank_group();
  CHECK(group->world.alone());
  group->start_stats({1, 2, 3, 40, true, 0.5});
  const StepStats stats = group->finish_stats();
  CHECK(stats.scored == 40);
  CHECK(stats.stop);
  CHECK(stats.median_busy == 0.5);
  CHECK(group->share("a") == "a");
  CHECK(group->collect("b") == std::vector<std::string>{"b"});
  group->barrier("alone"), group->finish();
}

}  // namespace
}  // namespace crossply
