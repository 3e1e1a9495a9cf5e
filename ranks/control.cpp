#include "ranks/control.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
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
constexpr double hello_seconds = 3;                   // for a guest to introduce himself
constexpr double goodbye_seconds = 1;                 // for the others to hear a verdict

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Record record_of(const Verdict& v) {
  return {Record::verdict, v.rank, {static_cast<int64_t>(v.code), static_cast<int64_t>(v.cause), v.step}};
}

// A number from the network as an exit code.
Exit exit_of(int64_t number) { return number > 0 && number < 256 ? static_cast<Exit>(number) : Exit::peer_lost; }

std::string describe(const Message& question) {
  const Numbers& n = question.record.number;
  switch (question.record.kind) {
    case Record::vote: return str("step ", n[0], ", data position ", n[1], ", ", n[2], " transfers");
    case Record::barrier: return "the barrier \"" + question.texts[0] + "\"";
    case Record::share: return "a shared text";
    case Record::collect: return "a collection of texts";
    default: return "its end";
  }
}

bool is_same(const Message& a, const Message& b) {
  const Numbers &x = a.record.number, &y = b.record.number;
  if (a.record.kind != b.record.kind) return false;
  if (a.record.kind == Record::vote) return std::equal(x.begin(), x.begin() + 3, y.begin());
  return a.record.kind != Record::barrier || a.texts[0] == b.texts[0];
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

bool read_exactly(int fd, char* to, size_t bytes, double seconds) {
  const double deadline = seconds_now() + seconds;
  while (bytes > 0 && seconds_now() < deadline) {
    pollfd wait{fd, POLLIN, 0};
    if (::poll(&wait, 1, 100) <= 0) continue;
    const ssize_t n = ::recv(fd, to, bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (n > 0) to += n, bytes -= static_cast<size_t>(n);
  }
  return bytes == 0;
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
  if (!place.leads()) peers_[0].socket = find_leader();
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

// Says hello wherever rank 0 may be, until it answers. It may not listen yet, and a file may be of the job before.
Descriptor Control::find_leader() {
  std::string reason;
  while (seconds_now() < began_ + options_.join_timeout) try {
      const MeetingPoint point = meeting_.look();
      const auto [one, other] = point.token;
      for (const std::string& endpoint : point.endpoints) {
        Descriptor socket = connect_to(endpoint, hello_seconds);
        reason = str("cannot connect to ", printable(endpoint), ": ", std::strerror(errno));
        if (socket.get() < 0) continue;
        const Record hello{Record::hello, place_.rank, {magic_number, one, other, place_.size}};
        Record reply{};
        if (::send(socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello &&
            read_exactly(socket.get(), reinterpret_cast<char*>(&reply), sizeof reply, hello_seconds) &&
            reply.kind == Record::welcome && reply.number == hello.number)
          return socket;
        reason = printable(endpoint) + " is not rank 0 of this job";
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    } catch (const Error& error) {  // the file is not there yet, or not whole
      reason = error.what();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  fail(Exit::device, "rank ", place_.rank, " has not found rank 0 within ", options_.join_timeout, " s: ", reason);
}

void Control::joined() {
  std::unique_lock lock(mutex_);
  if (!verdict_) state_ = State::running;
  if (state_ == State::running) return;
  changed_.wait(lock, [&] { return ended_; });
  throw Error(verdict_->code, verdict_->why);
}

int64_t Control::ask(Record::Kind kind, const Numbers& number, std::string text) {
  CHECK_THAT(text.size() <= most_text, "a text of ", text.size(), " bytes for the control plane");
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
  CHECK_THAT(verdict_.has_value(), "rank ", place_.rank, " asks after its end");
  throw Error(verdict_->code, verdict_->why);
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
  changed_.wait(lock, [&] { return ended_; });
  throw Error(verdict_->code, verdict_->why);
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
  if (verdict_ && state_ == State::running) changed_.wait(lock);  // for good: the watch thread ends the process
  if (ended_ || state_ == State::over) return;
  state_ = State::leaving;
  const std::string text = why.substr(0, most_text / 2);
  if (place_.leads())
    pronounce({Exit::peer_lost, code, 0, step_, str("rank 0 ended with code ", static_cast<int>(code), ": ", text)});
  else post(peers_[0], {Record::farewell, place_.rank, {static_cast<int64_t>(code), step_}}, text);
  changed_.wait_for(lock, 1.5 * patience, [&] { return ended_; });
}

// ---------------------------------------------------------------------------------------------------------------------
// Both threads.

void Control::post(Peer& to, const Record& record, const std::string& text) {
  const auto append = [&](const Record& r) { to.out.append(reinterpret_cast<const char*>(&r), sizeof r); };
  for (size_t i = 0; i < text.size(); i += sizeof(Numbers)) {
    const size_t bytes = std::min(sizeof(Numbers), text.size() - i);
    Record chunk{Record::text, static_cast<int32_t>(bytes), {}};
    std::memcpy(&chunk.number, text.data() + i, bytes);
    append(chunk);
  }
  append(record);
  send_some(to);
  if (!to.out.empty()) wake();  // the watch thread sends the rest
}

// An error is left to receive(), which meets it, too.
void Control::send_some(Peer& to) {
  size_t sent = 0;
  for (ssize_t n = 1; n > 0 && sent<to.out.size(); sent += n> 0 ? static_cast<size_t>(n) : 0)
    n = uninterrupted([&] {
      return ::send(to.socket.get(), to.out.data() + sent, to.out.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    });
  to.out.erase(0, sent);
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
      if (peer.socket.get() >= 0) post(peer, answer.record, first.record.kind == Record::share ? first.texts[0] : "");
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
    for (Peer& peer : peers_)
      if (peer.socket.get() >= 0) post(peer, record_of(verdict), verdict.why);
  wake();
  changed_.notify_all();
}

void Control::lose(Peer& peer, const std::string& why) {
  peer.socket = Descriptor();
  if (peer.rank < 0 || state_ == State::leaving) return;
  pronounce({Exit::peer_lost, Exit::peer_lost, peer.rank, peer.progress.step,
             str("rank ", peer.rank, " is lost, last seen in step ", peer.progress.step, ": ", why)});
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
    if (verdict_ && !told_) tell();
  }
  if (verdict_ && state_ == State::running) ::_exit(static_cast<int>(verdict_->code));
  for (Peer& peer : peers_) peer.socket = Descriptor();
  guests_.clear();
  ended_ = true;
  changed_.notify_all();
}

void Control::list_sockets() {
  sockets_.assign(1, {wake_[0].get(), POLLIN, 0});
  owners_.assign(1, nullptr);
  const auto add = [&](int fd, Peer* owner) {
    if (fd < 0) return;
    sockets_.push_back({fd, static_cast<short>(owner && !owner->out.empty() ? POLLIN | POLLOUT : POLLIN), 0});
    owners_.push_back(owner);
  };
  if (guests_.size() < static_cast<size_t>(place_.size) + 64)
    for (const Descriptor& listener : meeting_.listeners()) add(listener.get(), nullptr);
  for (Peer& guest : guests_) add(guest.socket.get(), &guest);
  for (Peer& peer : peers_) add(peer.socket.get(), &peer);
}

void Control::serve(double time) {
  if (time - last_pass_ > options_.peer_timeout)
    pronounce({Exit::peer_lost, Exit::peer_lost, place_.rank, step_,
               str("rank ", place_.rank, " stood still for ", static_cast<int64_t>(time - last_pass_),
                   " s, stopped or frozen: the others take it for lost")});
  last_pass_ = time;
  for (size_t i = 0; i < sockets_.size(); ++i) {
    if (sockets_[i].revents == 0) continue;
    char drained[64];
    if (owners_[i] == nullptr && i > 0) accept_guests(sockets_[i].fd, time);
    else if (owners_[i] == nullptr)
      while (::read(sockets_[i].fd, drained, sizeof drained) > 0) {
      }
    else receive(*owners_[i], time);
    if (owners_[i] != nullptr && owners_[i]->socket.get() >= 0) send_some(*owners_[i]);
  }
  guests_.remove_if([&](const Peer& g) { return g.socket.get() < 0 || time > g.heard + hello_seconds; });
  if (time >= next_beat_) beat(time);
}

void Control::accept_guests(int listener, double time) {
  Descriptor socket(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.get() < 0) return;
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  guests_.emplace_back();
  guests_.back().socket = std::move(socket);
  guests_.back().heard = time;
}

// Who does not know the token is none of this job. Who does hears what is wrong, and so do all who are here.
void Control::greet(Peer& guest, const Record& hello) {
  const auto [magic, one, other, size, zero, none, nil] = hello.number;
  if (hello.kind != Record::hello || magic != magic_number || std::array{one, other} != meeting_.look().token) {
    guest.socket = Descriptor();
    return;
  }
  post(guest, {Record::welcome, 0, hello.number});
  std::string wrong;
  const int rank = hello.rank;
  if (size != place_.size) wrong = str("rank ", rank, " is one of ", size, " ranks, rank 0 one of ", place_.size);
  else if (rank < 1 || rank >= size) wrong = str("there is a rank ", rank, " among ", size, " ranks");
  else if (peers_[static_cast<size_t>(rank)].heard > 0) wrong = str("two processes are rank ", rank);
  if (wrong.empty() && !verdict_) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    peer.heard = guest.heard, peer.socket = std::move(guest.socket);
    ++here_;
    return;
  }
  const Verdict verdict{Exit::usage, Exit::usage, rank, 0, wrong + ": how were they launched?"};
  if (!all_here()) pronounce(verdict);
  const Verdict& final = verdict_ ? *verdict_ : verdict;  // a job that runs is not ended by a latecomer
  post(guest, record_of(final), final.why);
}

void Control::receive(Peer& peer, double time) {
  char bytes[1 << 14];
  const ssize_t n = uninterrupted([&] { return ::recv(peer.socket.get(), bytes, sizeof bytes, MSG_DONTWAIT); });
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
  if (n <= 0) return lose(peer, "its connection closed, so its process has ended");
  peer.in.append(bytes, static_cast<size_t>(n));
  size_t at = 0;
  for (Record record; peer.socket.get() >= 0 && peer.in.size() - at >= sizeof record; at += sizeof record) {
    std::memcpy(&record, peer.in.data() + at, sizeof record);
    if (peer.rank < 0) greet(peer, record);
    else peer.heard = time, handle(peer, record);
  }
  peer.in.erase(0, at);
}

void Control::handle(Peer& peer, const Record& record) {
  const Numbers& n = record.number;
  const bool leads = place_.leads();
  if (record.kind == Record::beat) {
    peer.progress = {n[0], n[1], n[2], n[3]};
  } else if (record.kind == Record::text && record.rank > 0 && record.rank <= static_cast<int>(sizeof n) &&
             peer.text.size() <= most_text) {
    peer.text.append(reinterpret_cast<const char*>(&n), static_cast<size_t>(record.rank));
  } else if (record.kind >= Record::vote && record.kind <= Record::finish && peer.asked.size() < 8) {
    Message message{record, {std::exchange(peer.text, "")}};
    if (leads) peer.asked.push_back(std::move(message)), answer_all();
    else answers_[++answered_] = std::move(message), changed_.notify_all();
    if (!leads && record.kind == Record::finish) state_ = State::over;
  } else if (record.kind == Record::farewell && leads) {
    const Exit code = exit_of(n[0]);
    pronounce({Exit::peer_lost, code, peer.rank, n[1],
               str("rank ", peer.rank, " ended with code ", static_cast<int>(code), ": ", peer.text)});
  } else if (record.kind == Record::verdict && !leads) {
    pronounce({exit_of(n[0]), exit_of(n[1]), record.rank, n[2], peer.text});
  } else {
    lose(peer, str("it sent a record of kind ", record.kind, ", which nobody may send"));
  }
}

void Control::beat(double time) {
  next_beat_ = time + beat_every_;
  const Progress own = own_progress();
  if (place_.leads()) peers_[0].progress = own;
  for (Peer& peer : peers_) {
    if (peer.socket.get() < 0) continue;
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
  static constexpr const char* names[] = {"start", "step", "evaluation", "save", "end"};
  const size_t stage = static_cast<size_t>(late->progress.stage);
  pronounce({Exit::peer_lost, Exit::peer_lost, late->rank, least.second,
             str("no progress for ", late->progress.milliseconds / 1000, " s in step ", least.second, ", stage ",
                 stage < std::size(names) ? names[stage] : "unknown", "; furthest behind: rank ", behind)});
}

// Says it, and leaves it in a file, for launchers hide exit codes.
void Control::tell() {
  told_ = true;
  const Verdict& v = *verdict_;
  if (state_ == State::joining) return;  // the main thread will
  if (state_ == State::running) {
    const std::string line = str("rank ", place_.rank, ": error: ", printable(v.why),
                                 v.code == Exit::peer_lost ? "; start again with --resume\n" : "\n");
    if (::write(STDERR_FILENO, line.data(), line.size()) < 0) return;
  }
  const bool alone = v.rank == 0 || v.rank == place_.rank;  // nobody else may know
  if (options_.run_dir.empty() || !(place_.leads() || alone)) return;
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

bool Control::done(double time) const {
  const auto connected = [](const Peer& peer) { return peer.socket.get() >= 0; };
  const bool waiting = place_.leads() && std::any_of(peers_.begin(), peers_.end(), connected);
  if (stop_) return true;
  if (state_ == State::leaving && !place_.leads()) return verdict_ || !connected(peers_[0]);
  if (state_ == State::over) return !waiting || time > end_began_ + options_.peer_timeout;
  if (!verdict_) return false;
  const bool late_guests = place_.leads() && state_ == State::joining;  // who should hear it, too
  return !(waiting || late_guests) || time > end_began_ + goodbye_seconds;
}

}  // namespace crossply
