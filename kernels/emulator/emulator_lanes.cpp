// The emulator's two queues, and recordings of both.
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <string>
#include <utility>

#include "kernels/emulator/emulator.h"

namespace crossply::emulator {
namespace {

struct Policy {
  Transfers transfers = Transfers::lazy;
  uint64_t lots = 1;
};
Policy policy_of_environment() {
  const char* value = std::getenv("CROSSPLY_TRANSFERS");
  const std::string name = value != nullptr ? value : "lazy";
  if (name == "lazy") return {Transfers::lazy};
  if (name == "eager") return {Transfers::eager};
  return {Transfers::by_lot, std::strtoull(name.c_str(), nullptr, 10) * 2 + 1};
}
Policy& policy() {
  static Policy chosen = policy_of_environment();
  return chosen;
}
uint64_t lot(uint64_t below) {
  uint64_t& lots = policy().lots;
  lots ^= lots >> 12, lots ^= lots << 25, lots ^= lots >> 27;
  return (lots * 0x2545F4914F6CDD1Dull >> 33) % below;
}

std::deque<std::function<void()>> waiting;  // transfers that were asked for and are not done
int64_t asked = 0;                          // transfers so far
int64_t computed = 0, forked = 0;           // works of the compute lane; as many when the other lane last waited for it

struct Capture {
  std::shared_ptr<Works> works;  // null: nothing is captured
  int64_t number = 0, asked = 0, joined = 0;
  bool forked = false;
};
Capture captured;
// A ticket says of which capture it is, 0 for none, and counts its transfers.
constexpr int64_t max_transfers = int64_t{1} << 32;

void run_transfers(size_t most) {
  for (; most > 0 && !waiting.empty(); --most) {
    const auto run = std::move(waiting.front());
    waiting.pop_front();
    touch(run);
  }
}

void ask(const Work& work) {
  CHECK_THAT(forked == computed,
             "a transfer does not wait for the compute lane's last work: start_transfers is missing");
  touch(work.begin);
  waiting.push_back(work.run);
  ++asked;
  if (policy().transfers == Transfers::eager) run_transfers(waiting.size());
  if (policy().transfers == Transfers::by_lot) run_transfers(lot(waiting.size() + 1));
}

// before: transfers that were asked for before those that a ticket counts.
void perform(const Work& work, int64_t before) {
  const int64_t done = asked - static_cast<int64_t>(waiting.size());
  switch (work.kind) {
    case Work::compute: return ++computed, touch(work.run);
    case Work::transfer: return ask(work);
    case Work::fork: forked = computed; return;
    case Work::join: return run_transfers(static_cast<size_t>(std::max<int64_t>(before + work.ticket - done, 0)));
  }
}

void do_or_record(Work work) {
  if (captured.works != nullptr) return captured.works->push_back(std::move(work));
  perform(work, 0);
}

}  // namespace

void set_transfers(Transfers transfers, uint64_t seed) { policy() = {transfers, seed * 2 + 1}; }

void enqueue(std::function<void()> work) { do_or_record({Work::compute, std::move(work), {}}); }
int64_t works_done() { return computed; }

void enqueue_transfer(std::function<void()> begin, std::function<void()> run) {
  if (captures()) {
    CHECK_THAT(captured.forked, "a recording has a transfer before start_transfers, so it would not be recorded");
    ++captured.asked;
  }
  do_or_record({Work::transfer, std::move(run), std::move(begin)});
}
int64_t transfers_asked() { return asked; }
void fork_transfers() {
  captured.forked = true;
  do_or_record({Work::fork, {}, {}});
}
int64_t mark_transfers() { return captures() ? captured.number * max_transfers + captured.asked : asked; }
void join_transfers(int64_t ticket) {
  const int64_t of = ticket / max_transfers, here = captures() ? captured.number : 0, count = ticket % max_transfers;
  CHECK_THAT(of == here, "a ticket of recording ", of, " is waited for in recording ", here, " (0: in none)");
  captured.joined = std::max(captured.joined, count);
  do_or_record({Work::join, {}, {}, count});
}
void finish_transfers() {
  CHECK_THAT(!captures(), "a recording waits for transfers");
  run_transfers(waiting.size());
}

void begin_capture() {
  CHECK_THAT(!captures(), "a recording begins in another");
  captured = {std::make_shared<Works>(), captured.number + 1};
}
std::shared_ptr<Works> end_capture() {
  auto works = std::exchange(captured.works, nullptr);
  CHECK_THAT(captured.joined == captured.asked, "a recording ends with ", captured.asked - captured.joined,
             " transfers that the compute lane does not wait for");
  return works;
}
void abandon_capture() { captured.works = nullptr; }
bool captures() { return captured.works != nullptr; }
namespace {
Refused refused = Refused::nothing;
}
void refuse_captures(Refused at) { refused = at; }
bool refuses_capture(Refused at) { return at == refused; }
void launch(const Works& works) {
  const int64_t before = asked;
  for (const Work& work : works) perform(work, before);
}

}  // namespace crossply::emulator
