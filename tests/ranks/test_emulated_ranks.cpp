// Trainers as ranks of a job whose GPU is the emulator, as processes over the stand-in for NCCL: what many ranks give
// is what one gives, recorded or not, whenever transfers are done; and how they end where one is lost.
#if !CROSSPLY_CUDA

#include "cli/program.h"
#include "kernels/cuda/arithmetic.h"
#include "ranks/agree.h"
#include "tests/ranks/crowd.h"
#include "tests/ranks/ranks.h"
#include "tests/ranks/thread_group.h"
#include "tests/standin/nccl.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "train/run/ranks.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;
using emulator::Transfers;

namespace {

TrainPlan options_for(const std::string& model, const std::string& dtype, int64_t accumulate = 4) {
  TrainPlan plan;
  plan.config = tiny_with(model);
  plan.config.num_hidden_layers = 2;
  plan.device = "emulator";
  plan.batch = 1, plan.accumulate = accumulate, plan.steps = 100, plan.warmup = 1, plan.lr = 0.01;
  plan.dtype = dtype, plan.sum = "tree";
  plan.check_replicas = 1;
  return plan;
}

// With AdamW, Muon and NorMuon in turns.
TrainPlan by_turns(TrainPlan plan, size_t turn) {
  plan.optimizer = optimizers[turn % optimizers.size()];
  plan.muon.lr = 0.02, plan.muon.normalize_rows = plan.optimizer == "normuon";
  return plan;
}

// So many parameters that there are several buckets, whose exchange runs beside the backward.
TrainPlan wide_options(const std::string& model, const std::string& dtype, int ranks) {
  TrainPlan plan = options_for(model, dtype);
  plan.config.vocab_size = 1500, plan.config.intermediate_size = 700;
  plan.bucket_bytes = 40000;
  ParameterTable params;
  declare(params, plan);
  CHECK(Buckets(params, 0, ranks, plan.bucket_bytes).list().size() >= 2);
  return plan;
}

template <class T>
void append(std::string& to, const T* data, size_t count) {
  to.append(reinterpret_cast<const char*>(data), count * sizeof(T));
}

// The bits of everything that a rank knows after an evaluation: losses, norms and weights.
std::string bits_of(Trainer& trainer, int64_t steps, const Source& tested = Counting(5)) {
  std::string bits;
  for (int64_t step = 0; step < steps; ++step) {
    const StepResult result = trainer.step();
    append(bits, &result.loss, 1), append(bits, &result.norm, 1);
  }
  const double loss = trainer.evaluate(tested, 2);
  CHECK(std::isfinite(loss));
  append(bits, &loss, 1);
  trainer.gather_values();
  for (const Parameter& row : trainer.params().rows()) {
    const std::vector<float> values = trainer.params().read(row.value);
    append(bits, values.data(), values.size());
  }
  return bits;
}
// The first step runs plainly, the second is recorded, the third comes from the recording.
std::string train(const TrainPlan& plan, int64_t steps, std::shared_ptr<ProcessGroup> group = one_rank_group()) {
  const Counting data(5);
  Trainer trainer(plan, data, "", std::move(group));
  return bits_of(trainer, steps);
}

// Each of `size` processes does this as a rank of a job, which it has met as trainers do.
void with_job(int size, const TrainPlan& plan,
              const std::function<void(const TrainPlan&, const std::shared_ptr<ProcessGroup>&)>& body) {
  const TempDir scratch(memory_or_disk());
  const auto became = run_ranks(size, [&](const World& world) {
    TrainPlan o = plan;
    o.out = scratch.path.string();
    std::shared_ptr<ProcessGroup> group = one_rank_group(world);
    join_ranks(o, group);
    body(o, group);
    group->finish();
    group.reset();
    CHECK_THAT(standin::living() == 0, "a communicator was left");
  });
  for (size_t rank = 0; rank < became.size(); ++rank) CHECK_MESSAGE(became[rank].empty(), rank << ": " << became[rank]);
}

struct Policy {
  Transfers transfers;
  uint64_t seed;
};
const std::vector<Policy> policies = {
    {Transfers::lazy, 0}, {Transfers::eager, 0}, {Transfers::by_lot, 1}, {Transfers::by_lot, 2}};

void check_bits(int size, const TrainPlan& plan, const Policy& policy, int64_t steps, const std::string& bits) {
  CAPTURES(size, policy.transfers, policy.seed);
  with_job(size, plan, [&](const TrainPlan& rank_plan, const auto& group) {
    emulator::set_transfers(policy.transfers, policy.seed);
    CHECK_THAT(train(rank_plan, steps, group) == bits, "other bits than one rank's");
  });
}

}  // namespace

TEST_CASE("emulated ranks: the bits of one rank, every architecture, fp32 and bf16") {
  const bool all = std::getenv("CROSSPLY_TEST_ALL") != nullptr;  // every number of ranks with every policy
  size_t turn = 0;
  for (const Architecture& architecture : architectures()) {
    if (has_loops(tiny_config(architecture.name))) continue;
    for (const char* dtype : {"fp32", "bf16"}) {
      CAPTURES(architecture.name, dtype);
      const int own = turn / 4 % 2 == 0 ? 2 : 4;
      const TrainPlan plan = by_turns(options_for(architecture.name, dtype, all ? 4 : own), turn);
      const std::string one = train(plan, 2);
      for (const int size : {2, 4})
        for (size_t policy = 0; policy < policies.size(); ++policy)
          if (all || (size == own && policy == turn % policies.size()))
            check_bits(size, plan, policies[policy], 2, one);
      ++turn;
    }
  }
}

TEST_CASE(
    "emulated ranks: with loops, tables of n-grams, speed runs' shortcuts and combinations, too, the bits of one "
    "rank") {
  size_t turn = 0;
  for (const std::string choice :
       {"llama:loop=anchor:loop_passes=2", "mhc:loop=anchor", "llama:loop=stack:loop_passes=2:exit_gate=true",
        "llama:engram_layers=[1]:engram_rows=5:engram_heads=2:block_norm=branch",
        "shortcuts:unet=true:value_from=x0:lanes_from=1", "mhc+resformer+lime"}) {
    const int size = turn % 2 == 0 ? 2 : 4;
    const TrainPlan plan = by_turns(options_for(choice, turn % 3 == 0 ? "bf16" : "fp32", size), turn / 2);
    CAPTURES(choice, plan.dtype, plan.optimizer);
    check_bits(size, plan, policies[turn % policies.size()], 2, train(plan, 2));
    ++turn;
  }
}

TEST_CASE("emulated ranks: buckets are exchanged beside the backward") {
  struct Run {
    const char *model, *dtype;
    int size;
    Policy policy;
  };
  for (const Run& run : {Run{"lime", "fp32", 2, policies[0]}, Run{"mudd", "bf16", 2, policies[2]},
                         Run{"hyper", "fp32", 4, policies[3]}}) {
    CAPTURES(run.model, run.dtype);
    const TrainPlan plan = wide_options(run.model, run.dtype, run.size);
    check_bits(run.size, plan, run.policy, 3, train(plan, 3));
  }
}

TEST_CASE("emulated ranks: with products of eight bits, too, the bits of one rank") {
  TrainPlan plan = options_for("llama", "bf16");
  plan.matmul = "fp8";
  plan.config.hidden_size = plan.config.intermediate_size = 64;
  plan.config.num_attention_heads = plan.config.num_key_value_heads = 4, plan.config.head_dim = 16;
  plan.data.seq_len = 16;
  const Counting data(5, 16);
  const auto run = [&](const TrainPlan& rank_plan, const std::shared_ptr<ProcessGroup>& group) {
    Trainer trainer(rank_plan, data, "", group);
    CHECK(!trainer.model().tape().quantized().empty());
    return bits_of(trainer, 3, data);
  };
  const std::string one = run(plan, one_rank_group());
  for (const int size : {2, 4})
    with_job(size, plan, [&](const TrainPlan& rank_plan, const auto& group) {
      emulator::set_transfers(policies[3].transfers, policies[3].seed);
      CHECK_THAT(run(rank_plan, group) == one, "other bits than one rank's");
    });
}

TEST_CASE("emulated ranks: other sums are the same at every rank, and no step waits") {
  for (const char* sum : {"running", "library"}) {
    CAPTURE(sum);
    TrainPlan plan = wide_options("lime", "bf16", 2);
    plan.sum = sum;
    with_job(2, plan, [&](const TrainPlan& rank_plan, const auto& group) {
      const Counting data(5);
      Trainer trainer(rank_plan, data, "", group);
      trainer.step();
      std::vector<double> losses;
      for (int step = 0; step < 3; ++step) {
        const int64_t before = device_waits();
        trainer.next_batch(), trainer.forward_backward(), trainer.update();
        CHECK_THAT(device_waits() == before, device_waits() - before, " waits in a step");
        trainer.take_loss_and_norm();  // whose check of the replicas waits, too
        losses.push_back(trainer.last.loss);
      }
      CHECK_THAT(losses[2] < losses[0], "the loss does not fall");
      const std::vector<std::string> all = group->collect(bits_of(trainer, 1));
      CHECK_THAT(all.size() != 2 || all[0] == all[1], "the ranks know different numbers");
    });
  }
}

TEST_CASE(
    "emulated ranks: a loss that is not finite ends all, plain or from a recording, and nobody's weights change") {
  for (const int64_t step : {1, 2, 4}) {
    CAPTURE(step);
    with_job(2, options_for("lime", "bf16"), [&](const TrainPlan& rank_plan, const auto& group) {
      ::setenv("CROSSPLY_FAULT", str("1:", step, ":nan").c_str(), 1);
      const Counting data(5);
      Trainer trainer(rank_plan, data, "", group);
      const auto weights = [&] {
        std::vector<uint16_t> bits(static_cast<size_t>(trainer.params().bf16_copy().numel()));
        trainer.device().copy_out(bits.data(), trainer.params().bf16_copy().data, trainer.params().bf16_copy().bytes());
        return bits;
      };
      for (int64_t i = 1; i < step; ++i) trainer.step();
      const std::vector<uint16_t> before = weights();
      std::string said;
      try {
        trainer.step();
      } catch (const Error& error) {
        if (error.code == Exit::not_finite) said = error.what();
      }
      CHECK_THAT(has(said, "rank 1's micro-step 1") && has(said, "No update was made"), "\"", said, "\"");
      CHECK_THAT(weights() == before, "the weights changed");
      ::unsetenv("CROSSPLY_FAULT");
    });
  }
}

// In a process of its own each, ranks would draw other lots for the order of a product's sums.
TEST_CASE("emulated ranks: rank 0's choices for products are everybody's") {
  with_job(2, options_for("lime", "bf16"), [&](const TrainPlan& rank_plan, const auto& group) {
    forget_choices();
    if (!group->world.leads()) train(rank_plan, 1);  // so that the next lots are others
    forget_choices();
    const Counting data(5);
    Trainer trainer(rank_plan, data, "", group);
    bits_of(trainer, 2);
    std::string choices;
    for (const auto& [kind, choice] : choices_as_text()) choices += str(kind, ": ", choice, "\n");
    const std::vector<std::string> all = group->collect(choices);
    CHECK_THAT(all.size() != 2 || (all[0] == all[1] && all[0].size() > 100), all[0], "differ from\n", all[1]);
  });
}

TEST_CASE("emulated ranks: 1 -> 2 -> 4 -> 1 ranks have the bits of one that never stops") {
  const TempDir scratch(memory_or_disk());
  const TrainPlan plan = by_turns(options_for("mudd", "bf16"), 2);
  const auto dir = [&](int64_t step) { return scratch.file(str("step_", step)); };
  const Counting data(5);
  forget_choices();
  Trainer whole(plan, data);
  whole.step(), whole.step();
  whole.save(dir(2), Tokenizer());
  whole.step(), whole.step();
  const std::string fourth = bits_of(whole, 0);
  whole.step(), whole.step();
  const std::string sixth = bits_of(whole, 0), eighth = bits_of(whole, 2);
  const auto go_on = [&](const TrainPlan& rank_plan, const std::shared_ptr<ProcessGroup>& group, int64_t from,
                         const std::string& bits) {
    forget_choices();
    Trainer trainer(rank_plan, data, dir(from), group);
    trainer.step(), trainer.step();
    trainer.save(dir(from + 2), Tokenizer());
    CHECK_THAT(bits_of(trainer, 0) == bits, "other bits after step ", from + 2);
  };
  with_job(2, plan, [&](const TrainPlan& rank_plan, const auto& group) { go_on(rank_plan, group, 2, fourth); });
  with_job(4, plan, [&](const TrainPlan& rank_plan, const auto& group) { go_on(rank_plan, group, 4, sixth); });
  forget_choices();
  const std::string resumed = [&] {
    Trainer trainer(plan, data, dir(6));
    return bits_of(trainer, 2);
  }();
  CHECK(resumed == eighth);
}

TEST_CASE("emulated ranks: a rank that is killed, hangs, or has an error ends all") {
  struct End {
    standin::Fault fault;
    int64_t transfer;  // of rank 1: the first, or one in a recording
    int codes[2];
    const char* says;  // rank 0
  };
  for (const End& end : {End{standin::Fault::die, 0, {76, 256 + SIGKILL}, "rank 1"},
                         End{standin::Fault::die, 10, {76, 256 + SIGKILL}, "rank 1"},
                         End{standin::Fault::hang, 10, {76, 76}, "no progress for "},
                         End{standin::Fault::error, 10, {76, 71}, "rank 1 ended with code 71: NCCL: a transfer"}}) {
    CAPTURES(end.fault, end.transfer);
    Crowd crowd;
    JoinOptions join;
    join.run_dir = crowd.dir();
    if (end.fault == standin::Fault::hang) join.step_limit = 1;
    for (int rank = 0; rank < 2; ++rank)
      crowd.start(rank, [&, rank] {
        omp_set_num_threads(1);
        const TrainPlan plan = options_for("llama", "fp32");
        const std::shared_ptr<ProcessGroup> group = join_group({rank, 2, rank, 2}, join, nullptr);
        group->set_comm(make_nccl_comm(group->world, group->share(rank == 0 ? new_nccl_id() : "")));
        if (rank == 1) standin::inject(end.fault, end.transfer);
        const Counting data(5);
        try {
          Trainer trainer(plan, data, "", group);
          while (true) trainer.step();
        } catch (const Error& error) {
          end_rank(plan, *group, error, training_memory_remedy);
        }
        return 0;
      });
    for (int rank = 0; rank < 2; ++rank) {
      INFO("rank ", rank, " said: ", crowd.errors_of(rank));
      CHECK(crowd.code_of(rank, 10) == end.codes[rank]);
    }
    CHECK_MESSAGE(has(crowd.errors_of(0), end.says), crowd.errors_of(0));
  }
}

TEST_CASE("emulated ranks: two on one GPU are refused before NCCL is asked, unless that is meant") {
  const auto join = [](const std::vector<std::string>& gpus) {
    on_ranks(static_cast<int>(gpus.size()), [&](const std::shared_ptr<ProcessGroup>& group) {
      refuse_shared_gpu(*group, gpus[static_cast<size_t>(group->world.rank)]);
    });
  };
  const char* set = std::getenv("CROSSPLY_SHARE_GPU");
  const std::string before = set == nullptr ? "" : set;
  ::unsetenv("CROSSPLY_SHARE_GPU");
  join({"a", "b", "c"});
  check_fails(Exit::usage, {"ranks 0 and 2 have the same GPU, a", "one process a GPU"}, [&] { join({"a", "b", "a"}); });
  check_fails(Exit::usage, {"ranks 1 and 2 have the same GPU, b"}, [&] { join({"a", "b", "b", "b"}); });
  ::setenv("CROSSPLY_SHARE_GPU", "1", 1);
  join({"a", "a"});
  ::setenv("CROSSPLY_SHARE_GPU", before.c_str(), 1);
}

#endif
