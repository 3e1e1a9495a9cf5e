#include "ranks/control.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <ctime>

#include "engine/json.h"
#include "engine/printable.h"

namespace crossply {
namespace {

constexpr int64_t magic_number = 0x63726F7373706C01;  // its last byte: the version of the protocol
constexpr double hello_seconds = 3;                   // until a stranger is closed
constexpr double goodbye_seconds = 1;                 // for the others to hear a verdict
constexpr double own_end_seconds = 0.5;               // for an error that all ranks find at once to be each one's own

Record record_of(const Verdict& v) {
  return {Record::verdict, v.rank, {static_cast<int64_t>(v.code), static_cast<int64_t>(v.cause), v.step}};
}

// A number from the network as an exit code.
Exit exit_of(int64_t number) { return number > 0 && number < 256 ? static_cast<Exit>(number) : Exit::peer_lost; }

// What all ranks must ask alike: the same question, of the same step, position and transfers.
bool is_same(const Message& a, const Message& b) {
  const Numbers &x = a.record.number, &y = b.record.number;
  if (a.record.kind != b.record.kind) return false;
  if (a.record.kind == Record::barrier) return a.texts == b.texts;
  return a.record.kind != Record::vote || std::equal(x.begin(), x.begin() + 3, y.begin());
}

std::string describe(const Message& question) {
  const auto [kind, rank, n] = question.record;
  if (kind == Record::vote) return str("step ", n[0], ", data position ", n[1], ", ", n[2], " transfers");
  if (kind == Record::barrier) return "the barrier \"" + question.texts[0] + "\"";
  return kind == Record::share ? "a text to share" : kind == Record::collect ? "texts to collect" : "its end";
}

// Of {step, position, transfers, scored, stop, busy nanoseconds} of each rank:
// {sum of scored, any stop, least, median and most busy, the rank with the most}. Integers: in any order the same.
Numbers tally_of(const std::vector<Numbers>& votes) {
  Numbers tally{};
  std::vector<int64_t> busy;
  for (const Numbers& vote : votes) {
    tally[0] += vote[3], tally[1] |= vote[4];
    busy.push_back(vote[5]);
  }
  tally[5] = std::max_element(busy.begin(), busy.end()) - busy.begin();
  std::sort(busy.begin(), busy.end());
  tally[2] = busy.front(), tally[3] = busy[busy.size() / 2], tally[4] = busy.back();
  return tally;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The main thread.

Control::Control(const Place& place, const JoinOptions& options, Comm* mpi)
    : place_(place),
      options_(options),
      meeting_(place, options.run_dir, mpi),
      peers_(place.leads() ? static_cast<size_t>(place.size) : 1),
      began_(seconds_now()),
      beat_every_(std::min(1.0, options.peer_timeout / 5)) {
  int ends[2];
  if (::pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) fail(Exit::device, "cannot make a pipe: ", std::strerror(errno));
  wake_ = {Descriptor(ends[0]), Descriptor(ends[1])};
  for (Peer& peer : peers_) peer.rank = static_cast<int>(&peer - peers_.data());
  if (!place.leads()) peers_[0].connection = find_leader();
  stage_began_ = last_pass_ = peers_[0].heard = seconds_now();
  sigset_t all, before;  // signals are for the main thread
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  watch_ = std::thread([this] { watch(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Control::~Control() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    wake();
  }
  watch_.join();
}

// A connection on which rank 0 has answered our hello; else a closed one, and why.
Link Control::say_hello(const std::string& endpoint, const std::array<int64_t, 2>& token, std::string& why) const {
  Link leader = connect_to(endpoint, hello_seconds);
  why = str("cannot connect to ", printable(endpoint), ": ", std::strerror(errno));
  if (!leader.is_open()) return leader;
  const Record hello{Record::hello, place_.rank, {magic_number, token[0], token[1], place_.size}};
  leader.post(hello);
  const auto reply = leader.wait_for_first(hello_seconds);
  if (reply && reply->record.kind == Record::welcome && reply->record.number == hello.number) return leader;
  why = printable(endpoint) + " is not rank 0 of this job";
  return Link();
}

// Rank 0 may not listen yet, and a file may be of the job before: again and again, until the deadline.
Link Control::find_leader() const {
  std::string why;
  for (; seconds_now() < began_ + options_.join_timeout; std::this_thread::sleep_for(std::chrono::milliseconds(50))) {
    try {
      const MeetingPoint point = meeting_.look();
      for (const std::string& endpoint : point.endpoints)
        if (Link leader = say_hello(endpoint, point.token, why); leader.is_open()) return leader;
    } catch (const Error& error) {  // the file is not there yet, or not whole
      why = error.what();
    }
  }
  fail(Exit::device, "rank ", place_.rank, " has not found rank 0 within ", options_.join_timeout, " s: ", why);
}

void Control::joined() {
  std::unique_lock lock(mutex_);
  if (verdict_) throw_verdict(lock);
  state_ = State::running;
}

// When all have heard it.
void Control::throw_verdict(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [&] { return ended_; });
  CHECK_THAT(verdict_.has_value(), "rank ", place_.rank, " asks after its end");
  if (forwarded_) throw SharedError(verdict_->code, verdict_->why);
  throw Error(verdict_->code, verdict_->why);
}

int64_t Control::ask(Record::Kind kind, const Numbers& number, std::string text) {
  CHECK_THAT(text.size() <= Link::most_text, "a text of ", text.size(), " bytes for the control plane");
  const std::lock_guard lock(mutex_);
  const Record record{kind, place_.rank, number};
  if (place_.leads()) {
    peers_[0].asked.push_back({record, {std::move(text)}});
    answer_all();
  } else {
    post(peers_[0], record, text);
  }
  return ++asked_;
}

Message Control::answer(int64_t question) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return answers_.contains(question) || ended_; });
  if (auto answer = answers_.extract(question)) return std::move(answer.mapped());
  throw_verdict(lock);
}

void Control::enter(Stage stage, int64_t step) {
  const std::lock_guard lock(mutex_);
  const double time = seconds_now();
  if (stage_ == Stage::step)
    step_seconds_[static_cast<size_t>(steps_timed_++) % step_seconds_.size()] = time - stage_began_;
  stage_ = stage, step_ = step, stage_began_ = time;
}

void Control::refuse(const Verdict& verdict) {
  std::unique_lock lock(mutex_);
  pronounce(verdict);
  throw_verdict(lock);
}

void Control::finish() {
  enter(Stage::finish, step_);
  answer(ask(Record::finish));
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return ended_; });
}

void Control::farewell(Exit code, const std::string& why) {
  std::unique_lock lock(mutex_);
  // Where a transfer failed, a lost peer is likelier than this device: it will be known in a moment.
  const auto patience = std::chrono::duration<double>(goodbye_seconds);
  if (code == Exit::device) changed_.wait_for(lock, patience, [&] { return ended_ || verdict_; });
  const bool lost = verdict_ && verdict_->cause == Exit::peer_lost;
  if (lost && state_ == State::running) changed_.wait(lock, [] { return false; });  // the watch thread ends it all
  if (ended_ || state_ == State::over) return;
  state_ = State::leaving;
  const std::string text = why.substr(0, Link::most_text / 2);
  if (place_.leads())
    pronounce({Exit::peer_lost, code, 0, step_, str("rank 0 ended with code ", static_cast<int>(code), ": ", text)});
  else post(peers_[0], {Record::farewell, place_.rank, {static_cast<int64_t>(code), step_}}, text);
  changed_.wait_for(lock, 1.5 * patience, [&] { return ended_; });
}

// ---------------------------------------------------------------------------------------------------------------------
// Both threads.

void Control::post(Peer& to, const Record& record, const std::string& text) {
  if (!to.connection.is_open()) return;
  to.connection.post(record, text);
  if (to.connection.has_unsent()) wake();  // the watch thread sends the rest
}

void Control::wake() const {
  if (::write(wake_[1].get(), "", 1) < 0) return;  // full: it is awake
}

// Rank 0 answers whatever all ranks have asked.
void Control::answer_all() {
  while (!verdict_ && std::all_of(peers_.begin(), peers_.end(), [](const Peer& p) { return !p.asked.empty(); })) {
    const Message first = std::move(peers_[0].asked.front());
    Message answer{first.record, {}};
    std::string different;
    std::vector<Numbers> numbers;
    for (Peer& peer : peers_) {
      const Message& question = &peer == &peers_[0] ? first : peer.asked.front();
      if (!is_same(question, first)) different += str("rank ", peer.rank, " is at ", describe(question), ", ");
      numbers.push_back(question.record.number);
      if (first.record.kind == Record::collect) answer.texts.push_back(question.texts[0]);
    }
    if (!different.empty())
      return pronounce({Exit::internal, Exit::internal, 0, step_, different + "rank 0 at " + describe(first)});
    if (first.record.kind == Record::vote) answer.record.number = tally_of(numbers);
    if (first.record.kind == Record::share) answer.texts = first.texts;
    for (Peer& peer : peers_) {
      peer.asked.pop_front();
      post(peer, answer.record, first.record.kind == Record::share ? first.texts[0] : "");
    }
    if (first.record.kind == Record::finish) state_ = State::over, end_began_ = seconds_now(), wake();
    answers_[++answered_] = std::move(answer);
    changed_.notify_all();
  }
}

// The first verdict is the one that counts. Rank 0 forwards it.
void Control::pronounce(const Verdict& verdict) {
  if (verdict_ || state_ == State::over) return;
  verdict_ = verdict;
  end_began_ = seconds_now();
  if (place_.leads())
    for (Peer& peer : peers_) post(peer, record_of(verdict), verdict.why);
  wake();
  changed_.notify_all();
}

void Control::lose(Peer& peer, const std::string& why) {
  peer.connection.close();
  if (peer.rank < 0 || state_ == State::leaving) return;
  pronounce({Exit::peer_lost, Exit::peer_lost, peer.rank, step_,
             str("rank ", peer.rank, " is lost in step ", step_, ": ", why)});
}

Control::Progress Control::own_progress() const {
  return {asked_, step_, static_cast<int64_t>(stage_), static_cast<int64_t>((seconds_now() - stage_began_) * 1000)};
}

double Control::limit_of(const Progress& progress) const {
  const auto stage = static_cast<Stage>(progress.stage);
  if (stage == Stage::start || (stage == Stage::step && steps_timed_ == 0)) return options_.first_limit;
  if (stage != Stage::step) return options_.long_limit;
  std::array<double, 32> last = step_seconds_;
  const auto count = std::min<std::ptrdiff_t>(steps_timed_, last.size());
  std::nth_element(last.begin(), last.begin() + count / 2, last.begin() + count);
  return std::max(options_.step_limit, 10 * last[static_cast<size_t>(count / 2)]);
}

// ---------------------------------------------------------------------------------------------------------------------
// The watch thread.

void Control::watch() {
  std::unique_lock lock(mutex_);
  for (double time = seconds_now(); !done(time); time = seconds_now()) {
    list_sockets();
    const double until = verdict_ || state_ == State::over ? std::min(next_beat_, time + 0.05) : next_beat_;
    const int milliseconds = static_cast<int>(1000 * std::max(0.0, until - time)) + 1;
    lock.unlock();
    ::poll(sockets_.data(), static_cast<nfds_t>(sockets_.size()), milliseconds);
    lock.lock();
    serve(seconds_now());
    if (verdict_ && !told_) leave_word();
  }
  if (verdict_ && state_ == State::running) {
    tell();
    ::_exit(static_cast<int>(verdict_->code));
  }
  for (Peer& peer : peers_) peer.connection.close();
  guests_.clear();
  ended_ = true;
  changed_.notify_all();
}

void Control::list_sockets() {
  sockets_.assign(1, {wake_[0].get(), POLLIN, 0});
  owners_.assign(1, nullptr);
  const auto add = [&](Peer& peer) {
    if (!peer.connection.is_open()) return;
    const int events = peer.connection.has_unsent() ? POLLIN | POLLOUT : POLLIN;
    sockets_.push_back({peer.connection.fd(), static_cast<short>(events), 0});
    owners_.push_back(&peer);
  };
  for (Peer& peer : peers_) add(peer);
  for (Peer& guest : guests_) add(guest);
  if (guests_.size() > static_cast<size_t>(place_.size) + 64) return;  // more must wait
  for (const Descriptor& listener : meeting_.listeners()) {
    sockets_.push_back({listener.get(), POLLIN, 0});
    owners_.push_back(nullptr);
  }
}

void Control::serve(double time) {
  if (time - last_pass_ > options_.peer_timeout)
    pronounce({Exit::peer_lost, Exit::peer_lost, place_.rank, step_,
               str("rank ", place_.rank, " stood still for ", static_cast<int64_t>(time - last_pass_),
                   " s, stopped or frozen: the others take it for lost")});
  last_pass_ = time;
  char drained[64];
  if (sockets_[0].revents != 0 && ::read(wake_[0].get(), drained, sizeof drained) < 0) return;
  for (size_t i = 1; i < sockets_.size(); ++i) {
    if (sockets_[i].revents == 0) continue;
    if (owners_[i] == nullptr) {
      accept_guest(sockets_[i].fd, time);
      continue;
    }
    receive(*owners_[i], time);
    owners_[i]->connection.send_some();
  }
  guests_.remove_if([&](const Peer& g) { return !g.connection.is_open() || time > g.heard + hello_seconds; });
  if (time >= next_beat_) beat(time);
}

void Control::accept_guest(int listener, double time) {
  Descriptor socket(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.get() < 0) return;
  guests_.emplace_back();
  guests_.back().connection = Link(std::move(socket));
  guests_.back().heard = time;
}

// Who does not know the token is none of this job. Who does hears what is wrong, and so do all who are here.
void Control::greet(Peer& guest, const Record& hello) {
  const auto [magic, one, other, size, zero, none, nil] = hello.number;
  if (hello.kind != Record::hello || magic != magic_number || std::array{one, other} != meeting_.look().token)
    return guest.connection.close();
  post(guest, {Record::welcome, 0, hello.number});
  std::string wrong;
  const int rank = hello.rank;
  if (size != place_.size) wrong = str("rank ", rank, " is one of ", size, " ranks, rank 0 one of ", place_.size);
  else if (rank < 1 || rank >= size) wrong = str("there is a rank ", rank, " among ", size, " ranks");
  else if (peers_[static_cast<size_t>(rank)].heard > 0) wrong = str("two processes are rank ", rank);
  if (wrong.empty() && !verdict_) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    peer.heard = guest.heard, peer.connection = std::move(guest.connection);
    guest.connection.close();
    ++here_;
    return;
  }
  const Verdict verdict{Exit::usage, Exit::usage, rank, 0, wrong + ": how were they launched?"};
  if (!all_here()) pronounce(verdict);
  const Verdict& final = verdict_ ? *verdict_ : verdict;  // a job that runs is not ended by a latecomer
  post(guest, record_of(final), final.why);
}

void Control::receive(Peer& peer, double time) {
  if (!peer.connection.receive()) return lose(peer, "its connection closed, so its process has ended");
  while (auto message = peer.connection.next()) {
    if (peer.rank < 0) greet(peer, message->record);
    else peer.heard = time, handle(peer, std::move(*message));
  }
}

void Control::handle(Peer& peer, Message message) {
  const auto [kind, rank, n] = message.record;
  const std::string& text = message.texts[0];
  const bool leads = place_.leads();
  if (kind == Record::beat) {
    peer.progress = {n[0], n[1], n[2], n[3]};
  } else if (kind >= Record::vote && kind <= Record::finish && peer.asked.size() < 8) {
    if (!leads && kind == Record::finish) state_ = State::over;
    if (leads) peer.asked.push_back(std::move(message)), answer_all();
    else answers_[++answered_] = std::move(message), changed_.notify_all();
  } else if (kind == Record::farewell && leads) {
    pronounce({Exit::peer_lost, exit_of(n[0]), peer.rank, n[1],
               str("rank ", peer.rank, " ended with code ", n[0], ": ", text)});
  } else if (kind == Record::verdict && !leads) {
    forwarded_ = true;
    pronounce({exit_of(n[0]), exit_of(n[1]), rank, n[2], text});
  } else {
    lose(peer, str("it sent a record of kind ", kind, ", which is none of its"));
  }
}

void Control::beat(double time) {
  next_beat_ = time + beat_every_;
  const Progress own = own_progress();
  if (place_.leads()) peers_[0].progress = own;
  for (Peer& peer : peers_) {
    if (!peer.connection.is_open()) continue;
    post(peer, {Record::beat, place_.rank, {own.asked, own.step, own.stage, own.milliseconds}});
    if (time > peer.heard + options_.peer_timeout)
      lose(peer, str("silent for ", options_.peer_timeout, " s: stopped, or cut off"));
  }
  if (!place_.leads()) return;
  if (all_here()) return judge_progress();
  if (time < began_ + options_.join_timeout) return;
  std::string missing;
  for (const Peer& peer : peers_)
    if (peer.rank > 0 && peer.heard == 0) missing += str(missing.empty() ? "" : ", ", peer.rank);
  pronounce({Exit::device, Exit::device, 0, 0,
             str("after ", options_.join_timeout, " s there are only ", here_, " of ", place_.size,
                 " ranks; missing: ", missing, ". Did all processes start, and can they reach rank 0?")});
}

// Whoever waits for others has asked for more than they have: only those furthest behind are judged.
void Control::judge_progress() {
  const auto key = [](const Peer& peer) { return std::pair(peer.progress.asked, peer.progress.step); };
  const auto before = [&](const Peer& a, const Peer& b) { return key(a) < key(b); };
  const auto least = key(*std::min_element(peers_.begin(), peers_.end(), before));
  const Peer* late = nullptr;
  std::string behind;
  for (const Peer& peer : peers_) {
    if (key(peer) != least) continue;
    behind += str(behind.empty() ? "" : ", ", peer.rank);
    if (peer.progress.milliseconds > 1000 * limit_of(peer.progress)) late = &peer;
  }
  if (late == nullptr || state_ != State::running) return;
  static constexpr const char* names[] = {"start", "step", "evaluation", "save", "comparison of weights", "end"};
  const size_t stage = static_cast<size_t>(late->progress.stage);
  pronounce({Exit::peer_lost, Exit::peer_lost, late->rank, least.second,
             str("no progress for ", late->progress.milliseconds / 1000, " s in step ", least.second, ", stage ",
                 stage < std::size(names) ? names[stage] : "unknown", "; furthest behind: rank ", behind)});
}

// Says what ends this process, unless its own error, which may be the same, does so first.
void Control::tell() const {
  const std::string line = str("rank ", place_.rank, ": error: ", printable(verdict_->why),
                               verdict_->cause == Exit::peer_lost ? "; start again with --resume\n" : "\n");
  if (::write(STDERR_FILENO, line.data(), line.size()) < 0) return;
}

// In a file, for launchers hide exit codes.
void Control::leave_word() {
  told_ = true;
  const Verdict& v = *verdict_;
  if (state_ == State::joining || options_.run_dir.empty() || forwarded_) return;  // rank 0 writes it
  const nlohmann::json record = {{"code", static_cast<int>(v.cause)},
                                 {"rank", v.rank},
                                 {"why", utf8_or_escaped(v.why)},
                                 {"step", v.step},
                                 {"time", std::time(nullptr)}};
  try {
    write_file_atomically(options_.run_dir + "/last_exit.json", record.dump() + "\n");
  } catch (const Error&) {
  }
}

// Whether the connections are of no more use: after a verdict or the end, when the others have closed theirs.
bool Control::done(double time) const {
  const auto is_open = [](const Peer& peer) { return peer.connection.is_open(); };
  const bool heard = all_here() && std::none_of(peers_.begin(), peers_.end(), is_open);  // by all
  const double since = time - end_began_;
  if (stop_) return true;
  if (state_ == State::over) return !place_.leads() || heard || since > options_.peer_timeout;
  if (state_ == State::leaving && !place_.leads()) return verdict_ || !is_open(peers_[0]);
  if (!verdict_) return false;
  if (state_ == State::running && verdict_->cause != Exit::peer_lost && since < own_end_seconds) return false;
  return !place_.leads() || heard || since > goodbye_seconds;
}

}  // namespace crossply
