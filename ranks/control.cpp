#include "ranks/control.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <future>

#include "engine/io/json.h"
#include "engine/io/printable.h"
#include "engine/platform.h"

namespace crossply {
namespace {

constexpr int64_t magic_number = 0x63726F7373706C01;  // its last byte: the version of the protocol
constexpr int hello_seconds = 3;                      // until a stranger is closed
constexpr double goodbye_seconds = 1;                 // for the others to receive the reason
constexpr double own_end_seconds = 0.5;               // for an error that all ranks find at once to be each one's own
constexpr int pass_milliseconds = 50;                 // the watch thread looks so often at what no socket tells it

Record record_of(const AbortReason& v) {
  return {Record::reason, v.rank, {static_cast<int64_t>(v.code), static_cast<int64_t>(v.cause), v.step}};
}

// What all ranks must ask alike.
std::string describe(const Message& question) {
  const auto [kind, rank, n] = question.record;
  if (kind == Record::stats) return str("step ", n[0], ", data position ", n[1], ", ", n[2], " transfers");
  if (kind == Record::barrier) return "the barrier \"" + question.texts[0] + "\"";
  return kind == Record::share ? "a text to share" : kind == Record::collect ? "texts to collect" : "its end";
}

// Reduces {step, position, transfers, scored, stop, busy nanoseconds} of each rank to {sum of scored, any stop,
// smallest, median and largest busy time, slowest rank}. Integers, so that the order does not matter.
Numbers sum_stats(const std::vector<Message>& all_stats) {
  Numbers sums{};
  std::vector<int64_t> busy;
  for (const Message& stats : all_stats) {
    sums[0] += stats.record.number[3], sums[1] |= stats.record.number[4];
    busy.push_back(stats.record.number[5]);
  }
  sums[5] = std::max_element(busy.begin(), busy.end()) - busy.begin();
  std::sort(busy.begin(), busy.end());
  sums[2] = busy.front(), sums[3] = busy[(busy.size() - 1) / 2], sums[4] = busy.back();
  return sums;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The main thread.

Control::Control(const World& world, const JoinOptions& options, Comm* mpi)
    : world_(world), options_(options), rendezvous_(world, options.run_dir, mpi), began_(seconds_now()) {
  Link leader = world.leads() ? Link() : find_leader();
  stage_began_ = seconds_now();
  ranks_.push_back({0, std::move(leader), stage_began_, {}});
  watch_ = std::thread([this] { watch(); });
}

Control::~Control() {
  {
    const std::lock_guard lock(mutex_);
    watch_deadline_ = seconds_now();
  }
  if (watch_.joinable()) watch_.join();
}

// Rank 0 may not listen yet, and a file may be of the job before: again and again, until the deadline.
Link Control::find_leader() const {
  std::string why;
  for (; seconds_now() < began_ + options_.join_timeout; std::this_thread::sleep_for(std::chrono::milliseconds(50))) {
    try {
      const auto [addresses, token] = rendezvous_.rank_zero();
      const Record hello{Record::hello, world_.rank, {magic_number, token[0], token[1], world_.size}};
      for (const std::string& endpoint : addresses) {
        Link leader = connect_to(endpoint, hello_seconds);
        why = printable(endpoint) + ": " + (leader.is_open() ? "not rank 0 of this job" : std::strerror(errno));
        leader.post(hello);
        const auto reply = leader.wait(hello_seconds);
        if (reply && reply->record.kind == Record::welcome && reply->record.number == hello.number) return leader;
      }
    } catch (const Error& error) {  // the file is not there yet, or not whole
      why = error.what();
    }
  }
  fail(Exit::device, "rank ", world_.rank, " has not found rank 0 within ", options_.join_timeout, " s: ", why);
}

// With the reason: does not return where the watch thread ends the process.
void Control::end(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  if (watch_.joinable()) watch_.join();
  CHECK_THAT(reason_.has_value(), "rank ", world_.rank, " asks after its end");
  if (!world_.leads() && reason_->cause != Exit::peer_lost) throw SharedError(reason_->code, reason_->why);
  throw Error(reason_->code, reason_->why);
}

void Control::joined() {
  std::unique_lock lock(mutex_);
  if (reason_) end(lock);
  state_ = State::running;
}

int64_t Control::ask(Record::Kind kind, const Numbers& number, std::string text) {
  CHECK_THAT(text.size() <= Link::max_text, "a text of ", text.size(), " bytes for the control plane");
  const std::lock_guard lock(mutex_);
  const Record record{kind, world_.rank, number};
  Peer& leader = ranks_.front();
  leader.link.post(record, text);
  if (world_.leads()) leader.pending.push_back({record, {std::move(text)}}), answer_all();
  return ++asked_;
}

Message Control::answer(int64_t question) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return answers_.contains(question) || ends(); });
  if (auto answer = answers_.extract(question)) return std::move(answer.mapped());
  end(lock);
}

void Control::enter(Stage stage, int64_t step) {
  const std::lock_guard lock(mutex_);
  const double time = seconds_now();
  if (stage_ == Stage::step)
    step_seconds_[static_cast<size_t>(steps_timed_++) % step_seconds_.size()] = time - stage_began_;
  stage_ = stage, step_ = step, stage_began_ = time;
}

void Control::refuse(const AbortReason& reason) {
  std::unique_lock lock(mutex_);
  abort_all(reason);
  end(lock);
}

void Control::finish() {
  enter(Stage::finish, step_);
  answer(ask(Record::finish));
  watch_.join();
}

void Control::abort(Exit code, const std::string& why) {
  std::unique_lock lock(mutex_);
  // Where a transfer failed, another rank's end is likelier than this device: it will be known in a moment.
  if (code == Exit::device) changed_.wait_for(lock, std::chrono::seconds(1), [&] { return ends(); });
  const std::string text = why.substr(0, Link::max_text / 2);
  if (!reason_ || (reason_->cause != Exit::peer_lost && code != Exit::device)) {
    state_ = State::leaving;
    if (world_.leads())
      abort_all({Exit::peer_lost, code, 0, step_, str("rank 0 ended with code ", static_cast<int>(code), ": ", text)});
    ranks_.front().link.post({Record::abort, world_.rank, {static_cast<int64_t>(code), step_}}, text);
  }
  lock.unlock();
  if (watch_.joinable()) watch_.join();
}

// ---------------------------------------------------------------------------------------------------------------------
// Both threads.

// Rank 0 answers whatever all ranks have asked.
void Control::answer_all() {
  const auto has_asked = [](const Peer& peer) { return !peer.pending.empty(); };
  while (!ends() && all_here() && std::all_of(ranks_.begin(), ranks_.end(), has_asked)) {
    std::vector<Message> questions;
    for (Peer& peer : ranks_) questions.push_back(std::move(peer.pending.front())), peer.pending.pop_front();
    const std::string first = describe(questions[0]);
    std::string different;
    for (const Message& question : questions)
      if (const std::string other = describe(question); other != first)
        different += str("rank ", question.record.rank, " is at ", other, ", ");
    if (!different.empty())
      return abort_all({Exit::internal, Exit::internal, 0, step_, different + "rank 0 at " + first});
    Message answer = questions[0];
    const auto kind = answer.record.kind;
    if (kind == Record::stats) answer.record.number = sum_stats(questions);
    for (Peer& peer : ranks_) peer.link.post(answer.record, kind == Record::share ? answer.texts[0] : "");
    if (kind == Record::collect)  // all texts, for rank 0 alone
      for (size_t rank = 1; rank < questions.size(); ++rank)
        answer.texts.push_back(std::move(questions[rank].texts[0]));
    // The others close first: what they have not read yet would be lost.
    if (kind == Record::finish) watch_deadline_ = seconds_now() + options_.peer_timeout;
    answers_[++answered_] = std::move(answer);
    changed_.notify_all();
  }
}

// The first reason counts. Rank 0 sends it to all ranks and gives them time to receive it.
void Control::abort_all(const AbortReason& reason) {
  if (ends()) return;
  reason_ = reason;
  if (world_.leads())
    for (Peer& peer : ranks_) peer.link.post(record_of(reason), reason.why);
  const double now = seconds_now();
  main_deadline_ = now + (state_ == State::running && reason.cause != Exit::peer_lost ? own_end_seconds : 0);
  watch_deadline_ = world_.leads() ? now + goodbye_seconds : main_deadline_;
  changed_.notify_all();
}

// What ends this process, unless its own error, which may be the same, has done so first.
void Control::print_reason() const {
  const std::string line = str("rank ", world_.rank, ": error: ", printable(reason_->why),
                               reason_->cause == Exit::peer_lost ? "; start again with --resume\n" : "\n");
  if (::write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

// In a file, for launchers hide exit codes: rank 0 does it, or all if it is lost. Not for long: the file system may be
// what was cut off.
void Control::write_last_exit() const {
  const AbortReason& v = *reason_;
  const bool zero_is_lost = v.rank == 0 && v.cause == Exit::peer_lost;
  if (options_.run_dir.empty() || (!world_.leads() && !zero_is_lost)) return;
  const nlohmann::json record = {{"code", static_cast<int>(v.cause)},
                                 {"rank", v.rank},
                                 {"why", utf8_or_escaped(v.why)},
                                 {"step", v.step},
                                 {"time", std::time(nullptr)}};
  const auto written = std::make_shared<std::promise<void>>();
  std::thread([written, path = options_.run_dir + "/last_exit.json", text = json_text(record) + "\n"] {
    try {
      write_file_atomically(path, text);
    } catch (const Error&) {
    }
    written->set_value();
  }).detach();
  written->get_future().wait_for(std::chrono::seconds(2));
}

// ---------------------------------------------------------------------------------------------------------------------
// The watch thread.

void Control::watch() {
  const auto is_closed = [](const Peer& peer) { return !peer.link.is_open(); };
  const auto all_closed = [&] { return all_here() && std::all_of(ranks_.begin(), ranks_.end(), is_closed); };
  double next_beat = 0;
  std::unique_lock lock(mutex_);
  for (double time = seconds_now(); !ends() || time < main_deadline_ || (time < watch_deadline_ && !all_closed());) {
    std::vector<Peer*> peers;
    std::vector<pollfd> sockets;
    for (auto* list : {&ranks_, &guests_})
      for (Peer& peer : *list) {
        peers.push_back(&peer);
        sockets.push_back({peer.link.fd(), static_cast<short>(peer.link.has_unsent() ? POLLIN | POLLOUT : POLLIN), 0});
      }
    for (const Descriptor& listener : rendezvous_.listeners()) sockets.push_back({listener.get(), POLLIN, 0});
    lock.unlock();
    ::poll(sockets.data(), sockets.size(), pass_milliseconds);
    lock.lock();
    const double before = std::exchange(time, seconds_now());
    if (time - before > options_.peer_timeout)
      abort_all({Exit::peer_lost, Exit::peer_lost, world_.rank, step_,
                 str("rank ", world_.rank, " stood still for ", static_cast<int64_t>(time - before),
                     " s, stopped or frozen: the others take it for lost")});
    for (size_t i = 0; i < sockets.size(); ++i) {
      if (sockets[i].revents == 0) continue;
      if (i < peers.size()) serve(*peers[i]);
      else if (Descriptor guest(accept_connection(sockets[i].fd)); guest.get() >= 0)
        guests_.push_back({-1, Link(std::move(guest)), time, {}});
    }
    guests_.remove_if([&](const Peer& guest) { return is_closed(guest) || time > guest.heard + hello_seconds; });
    if (time >= next_beat) {
      beat(time);
      next_beat = time + std::min(1.0, options_.peer_timeout / 5);
    }
  }
  const bool over = reason_ && state_ == State::running;
  if (over) print_reason();
  if (reason_ && state_ != State::joining) write_last_exit();
  if (over) ::_exit(static_cast<int>(reason_->code));
  for (Peer& peer : ranks_) peer.link.close();
}

void Control::serve(Peer& peer) {
  peer.link.send_some();
  auto message = peer.link.receive();
  if (!peer.link.is_open()) return lose(peer, "its connection closed, so its process has ended");
  if (!message) return;
  if (peer.rank < 0) return greet(peer, message->record);
  peer.heard = seconds_now();
  handle(peer, std::move(*message));
}

// Who does not know the token is none of this group. Who does hears what is wrong, and so do all who are here.
void Control::greet(Peer& guest, const Record& hello) {
  const auto [magic, one, other, size, zero, none, nil] = hello.number;
  if (hello.kind != Record::hello || magic != magic_number || std::array{one, other} != rendezvous_.rank_zero().token)
    return guest.link.close();
  guest.link.post({Record::welcome, 0, hello.number});
  const int rank = hello.rank;
  std::string wrong;
  if (size != world_.size) wrong = str("rank ", rank, " is one of ", size, " ranks, rank 0 one of ", world_.size);
  else if (rank < 0 || rank >= size) wrong = str("there is a rank ", rank, " among ", size, " ranks");
  else if (is_here(rank)) wrong = str("two processes are rank ", rank);
  if (wrong.empty() && !reason_) {
    guest.rank = rank;
    ranks_.push_back(std::move(guest));
    ranks_.sort([](const Peer& a, const Peer& b) { return a.rank < b.rank; });
    return;
  }
  const AbortReason refusal{Exit::usage, Exit::usage, rank, 0, wrong + ": how were they launched?"};
  if (!all_here()) abort_all(refusal);  // a job that runs is not ended by a latecomer
  const AbortReason final = reason_.value_or(refusal);
  guest.link.post(record_of(final), final.why);
}

bool Control::is_here(int rank) const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const Peer& peer) { return peer.rank == rank; });
}

void Control::handle(Peer& peer, Message message) {
  const auto [kind, rank, n] = message.record;
  const std::string& text = message.texts[0];
  if (kind == Record::beat) {
    peer.progress = n;
  } else if (kind >= Record::stats && kind <= Record::finish) {
    if (world_.leads()) return peer.pending.push_back(std::move(message)), answer_all();
    if (kind == Record::finish) watch_deadline_ = seconds_now();
    answers_[++answered_] = std::move(message);
    changed_.notify_all();
  } else if (kind == Record::abort && world_.leads()) {
    abort_all({Exit::peer_lost, static_cast<Exit>(n[0]), peer.rank, n[1],
               str("rank ", peer.rank, " ended with code ", n[0], ": ", text)});
  } else if (kind == Record::reason && !world_.leads()) {
    abort_all({static_cast<Exit>(n[0]), static_cast<Exit>(n[1]), rank, n[2], text});
  } else {
    lose(peer, str("it sent a record of kind ", kind, ", which is none of its"));
  }
}

void Control::lose(Peer& peer, const std::string& why) {
  peer.link.close();
  if (peer.rank < 0) return;
  abort_all({Exit::peer_lost, Exit::peer_lost, peer.rank, step_,
             str("rank ", peer.rank, " is lost in step ", step_, ": ", why)});
}

void Control::beat(double time) {
  const Numbers own{asked_, step_, static_cast<int64_t>(stage_), static_cast<int64_t>(1000 * (time - stage_began_))};
  for (Peer& peer : ranks_) {
    if (peer.rank == world_.rank) peer.progress = own;
    if (!peer.link.is_open()) continue;
    peer.link.post({Record::beat, world_.rank, own});
    if (time > peer.heard + options_.peer_timeout)
      lose(peer, str("silent for ", options_.peer_timeout, " s: stopped, or cut off"));
  }
  if (!world_.leads()) return;
  if (all_here()) return check_progress();
  if (time < began_ + options_.join_timeout) return;
  std::string missing;
  for (int rank = 0; rank < world_.size; ++rank)
    if (!is_here(rank)) missing += str(missing.empty() ? "" : ", ", rank);
  abort_all({Exit::device, Exit::device, 0, 0,
             str("after ", options_.join_timeout, " s there are only ", ranks_.size(), " of ", world_.size,
                 " ranks; missing: ", missing, ". Did all processes start, and can they reach rank 0?")});
}

// Whoever waits for others has asked for more than they have: only those furthest behind are judged.
void Control::check_progress() {
  const auto key = [](const Peer& peer) { return std::pair(peer.progress[0], peer.progress[1]); };
  const auto before = [&](const Peer& a, const Peer& b) { return key(a) < key(b); };
  const auto least = key(*std::min_element(ranks_.begin(), ranks_.end(), before));
  const Peer* late = nullptr;
  std::string behind;
  for (const Peer& peer : ranks_) {
    if (key(peer) != least) continue;
    behind += str(behind.empty() ? "" : ", ", peer.rank);
    if (peer.progress[3] > 1000 * limit_of(static_cast<Stage>(peer.progress[2]))) late = &peer;
  }
  if (late == nullptr) return;
  static constexpr const char* names[] = {"start", "step", "evaluation", "save", "comparison of weights", "end"};
  const auto stage = static_cast<size_t>(late->progress[2]);
  abort_all({Exit::peer_lost, Exit::peer_lost, late->rank, least.second,
             str("no progress for ", late->progress[3] / 1000, " s in step ", least.second, ", stage ",
                 stage < std::size(names) ? names[stage] : "unknown", "; furthest behind: rank ", behind)});
}

double Control::limit_of(Stage stage) const {
  if (stage != Stage::step) return options_.long_limit;
  if (steps_timed_ == 0) return options_.first_limit;
  std::array<double, 32> last = step_seconds_;
  const auto count = std::min<std::ptrdiff_t>(steps_timed_, last.size());
  std::nth_element(last.begin(), last.begin() + count / 2, last.begin() + count);
  return std::max(options_.step_limit, 10 * last[static_cast<size_t>(count / 2)]);
}

}  // namespace crossply
