#include "ranks/process_group.h"

#include <unistd.h>

#include "engine/io/json.h"
#include "ranks/control.h"

namespace crossply {
namespace {

// One rank has everything already.
class OneRankComm : public Comm {
 public:
  std::string describe() const override { return "one rank"; }
  void exchange(const Tensor&, const Tensor&) override {}
  void gather(const Tensor&) override {}
  void broadcast(const Tensor&, int) override {}
  void route(const std::vector<Piece>&, const std::vector<Piece>&) override {}
  void reduce_scatter(const Tensor&) override {}
  Ticket mark() override { return 0; }
  void wait(Ticket) override {}
};

class OneRankGroup : public ProcessGroup {
 public:
  explicit OneRankGroup(const World& p) : ProcessGroup(p) {
    joining = !p.alone();
    if (p.alone()) set_comm(std::make_unique<OneRankComm>());
  }
  void start_stats(const RankStats& mine) override { stats_ = mine; }
  StepStats finish_stats() override {
    return {stats_.scored, stats_.stop, stats_.busy_seconds, stats_.busy_seconds, stats_.busy_seconds, 0};
  }
  void barrier(const char*) override {}
  std::string share(const std::string& text) override { return text; }
  std::vector<std::string> collect(const std::string& text) override { return {text}; }
  void enter(Stage, int64_t) override {}
  void finish() override {}
  void abort(Exit, const std::string&) override {}

 private:
  RankStats stats_;
};

class StarGroup : public ProcessGroup {
 public:
  StarGroup(const World& p, const JoinOptions& options, Comm* mpi) : ProcessGroup(p), control_(p, options, mpi) {}

  void join(const JoinOptions& options);
  void start_stats(const RankStats& v) override {
    const auto busy = static_cast<int64_t>(v.busy_seconds * 1e9);
    stats_ = control_.ask(Record::stats, {v.step, v.position, v.transfers, v.scored, v.stop, busy});
  }
  StepStats finish_stats() override {
    const Numbers n = control_.answer(stats_).record.number;
    return {n[0], n[1] != 0, n[2] * 1e-9, n[3] * 1e-9, n[4] * 1e-9, static_cast<int>(n[5])};
  }
  void barrier(const char* why) override { control_.answer(control_.ask(Record::barrier, {}, why)); }
  std::string share(const std::string& text) override {
    return control_.answer(control_.ask(Record::share, {}, world.leads() ? text : "")).texts.at(0);
  }
  std::vector<std::string> collect(const std::string& text) override {
    auto texts = control_.answer(control_.ask(Record::collect, {}, text)).texts;
    return world.leads() ? std::move(texts) : std::vector<std::string>();
  }
  void enter(Stage stage, int64_t step) override { control_.enter(stage, step); }
  void finish() override { control_.finish(); }
  void abort(Exit code, const std::string& why) override { control_.abort(code, why); }

 private:
  Control control_;
  int64_t stats_ = 0;
};

// What of this rank must be equal to rank 0's, in an order in which the first difference explains the others.
std::string list_of_same(const JoinOptions& options) {
  auto list = nlohmann::json::object();
  for (const auto& [name, value] : options.same) list[utf8_or_escaped(name)] = utf8_or_escaped(value);
  list["data"] = utf8_or_escaped(options.data);
  return json_text(list);
}

// The first item in which some ranks differ from rank 0, with these ranks and a value of theirs; "" if there is none.
std::string difference(const std::vector<nlohmann::json>& lists, const std::string& item) {
  std::string ranks, values;
  for (size_t rank = 1; rank < lists.size(); ++rank) {
    const auto mine = lists[0].value(item, nlohmann::json()), theirs = lists[rank].value(item, nlohmann::json());
    if (theirs == mine) continue;
    if (ranks.empty()) values = str(json_text(theirs).substr(0, 100), ", rank 0 has ", json_text(mine).substr(0, 100));
    ranks += str(ranks.empty() ? "" : ", ", rank);
  }
  return ranks.empty() ? "" : str("rank ", ranks, ": other ", item, " than rank 0: ", values);
}

void StarGroup::join(const JoinOptions& options) {
  std::vector<nlohmann::json> lists;
  for (const std::string& text : collect(list_of_same(options))) {
    lists.push_back(try_parse_json(text));
    if (!lists.back().is_object()) lists.back() = nlohmann::json::object();
  }
  if (world.leads()) {
    for (const auto& [item, value] : options.same)
      if (const std::string why = difference(lists, item); !why.empty())
        control_.refuse({Exit::usage, Exit::usage, 0, 0, why + "; start all ranks with the same program and flags"});
    if (const std::string why = difference(lists, "data"); !why.empty())
      control_.refuse({Exit::bad_data, Exit::bad_data, 0, 0, why + "; all ranks must read the same files"});
    if (!options.run_dir.empty()) ::unlink((options.run_dir + "/last_exit.json").c_str());  // of the job before
  }
  barrier("joined");
  control_.joined();
  enter(Stage::start, 0);
}

}  // namespace

std::unique_ptr<ProcessGroup> one_rank_group(const World& world) { return std::make_unique<OneRankGroup>(world); }

std::unique_ptr<ProcessGroup> join_group(const World& world, const JoinOptions& options, Comm* mpi) {
  CHECK_THAT(!world.alone() && world.rank >= 0 && world.rank < world.size, "rank ", world.rank, " of ", world.size);
  auto group = std::make_unique<StarGroup>(world, options, mpi);
  group->join(options);
  return group;
}

}  // namespace crossply
