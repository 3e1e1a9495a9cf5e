#include "ranks/job.h"

namespace crossply {
namespace {

class OneRank : public Job {
 public:
  OneRank() : Job(Place{}) {}
  void start_vote(const Vote& mine) override {
    tally_ = {mine.scored, mine.stop, mine.busy_seconds, mine.busy_seconds, mine.busy_seconds, 0};
  }
  Tally finish_vote() override { return tally_; }
  void barrier(const char*) override {}
  std::string share(const std::string& text) override { return text; }
  std::vector<std::string> collect(const std::string& text) override { return {text}; }
  void enter(Stage, int64_t) override {}
  void finish() override {}
  void farewell(Exit, const std::string&) override {}

 private:
  Tally tally_;
};

}  // namespace

std::unique_ptr<Job> one_rank_job() { return std::make_unique<OneRank>(); }

}  // namespace crossply
