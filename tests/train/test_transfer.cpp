// --transfer: the factors of rows, and what they leave alone.
#include "train/settings/transfer.h"

#include <cmath>
#include <map>
#include <sstream>

#include "tests/ranks/thread_group.h"
#include "tests/support/backends.h"
#include "tests/support/check.h"
#include "tests/support/program.h"
#include "tests/support/tiny.h"
#include "train/step/trainer.h"

using namespace crossply;
using namespace crossply::test;

namespace {

TrainPlan plan_of(const std::string& arch, const std::string& rule) {
  TrainPlan plan;
  plan.config = tiny_with(arch);
  plan.steps = 100, plan.batch = 2, plan.accumulate = 4, plan.warmup = 2, plan.lr = 0.01, plan.sum = "tree";
  plan.bucket_bytes = 70000;
  plan.transfer.rule = rule;
  plan.transfer.base_width = plan.config.hidden_size, plan.transfer.base_layers = plan.config.num_hidden_layers;
  return plan;
}

using Weights = std::map<std::string, std::vector<float>>;

// After some steps; norms: those that were reported.
Weights train(const TrainPlan& plan, int ranks = 1, std::vector<double>* norms = nullptr) {
  const Counting data(10);
  Weights all;
  on_ranks(ranks, [&](const std::shared_ptr<ProcessGroup>& group) {
    Trainer trainer(plan, data, "", group);
    std::vector<double> own;
    for (int i = 0; i < 3; ++i) own.push_back(trainer.step().norm);
    trainer.gather_values();
    if (!group->world.leads()) return;
    if (norms != nullptr) *norms = own;
    for (const Parameter& row : trainer.params().rows()) all[row.name] = trainer.params().read(row.value);
  });
  return all;
}

// A kind of row as the papers have it: what the forward multiplies its weights with, and for these the start, the rate,
// the decay and the epsilon, in multiples of the base shape's.
struct ForwardForm {
  double multiplier = 1, start = 1, rate = 1, decay = 1, eps = 1;
};

}  // namespace

// CompleteP (arXiv 2505.01618, table 1): the residual times mL^-alpha, logits times 1/mN, starts of hidden weights
// mN^-1/2, their rate mL^(alpha-1) / mN, decay mN, epsilons mL^-alpha / mN in the blocks and 1/mN outside. A weight W
// that stands for `multiplier` times its own has multiplier times the start, rate and norm, and decay and epsilon over
// it.
TEST_CASE("transfer: rows are the papers' forward form, folded") {
  const double mN = 4, mL = 2;
  for (const double alpha : {1.0, 0.5})
    for (const char* arch : {"llama", "gpt2"}) {
      CAPTURES(alpha, arch);
      TrainPlan plan = plan_of(arch, "completep");
      plan.transfer.base_width = plan.config.hidden_size / 4,
      plan.transfer.base_layers = plan.config.num_hidden_layers / 2;
      plan.transfer.depth_alpha = alpha;
      ParameterTable with, without;
      declare(with, plan);
      plan.transfer.rule = "none";
      declare(without, plan);
      const double residual = std::pow(mL, -alpha), depth = std::pow(mL, alpha - 1), in_block = residual / mN;
      const ForwardForm outside{1, 1, 1, 1, 1 / mN}, last{1 / mN, 1, 1, 1, 1 / mN}, vector{1, 1, depth, 1, in_block},
          hidden{1, 1 / std::sqrt(mN), depth / mN, mN, in_block};
      ForwardForm writes = hidden, bias = vector;
      writes.multiplier = bias.multiplier = residual;
      if (plan.config.gpt2()) writes.start *= std::sqrt(mL);  // what its own shrinks by
      const std::map<Role, ForwardForm> of_role = {{Role::embedding, outside},
                                                   {Role::head, outside},
                                                   {Role::final_norm, last},
                                                   {Role::norm, vector},
                                                   {Role::bias, vector},
                                                   {Role::input_projection, hidden},
                                                   {Role::output_projection, writes}};
      for (const Parameter& row : with.rows()) {
        CAPTURE(row.name);
        const Parameter& own = without.at(row.name);
        const bool of_output = row.name.ends_with("o_proj.bias") || row.name.ends_with("down_proj.bias");
        const ForwardForm f = of_output ? bias : of_role.at(row.role);
        const double start = own.init.at(1, 2, 3);
        CHECK(row.init.at(1, 2, 3) == doctest::Approx(f.multiplier * f.start * start));
        CHECK(row.lr_mul == doctest::Approx(f.multiplier * f.rate * own.lr_mul));
        CHECK(row.wd_mul * row.lr_mul == doctest::Approx(f.decay * f.rate * own.wd_mul * own.lr_mul));
        CHECK(row.eps_mul == doctest::Approx(f.eps / f.multiplier));
        CHECK(row.norm_mul == doctest::Approx(f.multiplier));
        CHECK(row.offset % (row.norm_mul == 1 ? 64 : leaf) == 0);
      }
    }
}

TEST_CASE("transfer: Muon's matrices have rates of their own, heads of another width theirs, routers the depth's") {
  TrainPlan plan = plan_of("lime", "completep");
  plan.config.qk_norm = false;
  plan.transfer.base_width = plan.config.hidden_size / 4, plan.transfer.base_layers = plan.config.num_hidden_layers / 2;
  plan.optimizer = "muon", plan.muon.lr = 0.02;
  const auto lr_mul = [&](const std::string& name) {
    ParameterTable params;
    declare(params, plan);
    return params.at("model.layers.1." + name).lr_mul;
  };
  const double before = lr_mul("self_attn.q_proj.weight");
  CHECK(before == doctest::Approx(0.5));  // mN^-1/2
  CHECK(lr_mul("self_attn.o_proj.weight") == doctest::Approx(0.25));
  CHECK(lr_mul("self_attn.lime_router.weight") == doctest::Approx(10 / 2.0));
  plan.transfer.base_head_width = 4 * plan.config.head_dim;
  CHECK(lr_mul("self_attn.q_proj.weight") == doctest::Approx(2 * before));
  plan.muon.scale = "spectral", plan.transfer.base_head_width = 0;
  CHECK(lr_mul("self_attn.q_proj.weight") == 1);
}

TEST_CASE("transfer: at the base shape nothing differs, to the bit; elsewhere it does, on any number of ranks alike") {
  for (const char* arch : {"llama", "gpt2", "mhc", "gated_streams"})
    for (const char* optimizer : {"adamw", "normuon"})
      for (const char* dtype : {"fp32", "bf16"}) {
        CAPTURES(arch, optimizer, dtype);
        TrainPlan plan = plan_of(arch, "none");
        plan.dtype = dtype, plan.optimizer = optimizer;
        plan.muon.lr = 0.02, plan.muon.normalize_rows = has_muon(optimizer);
        const Weights none = train(plan);
        for (const char* rule : {"mup", "completep"}) {
          plan.transfer.rule = rule;
          CHECK(train(plan) == none);
        }
        plan.transfer.base_width /= 2, plan.transfer.base_layers /= 2;
        const Weights other = train(plan);
        CHECK(other != none);
        CHECK(train(plan, 2) == other);
        CHECK(train(plan, 4) == other);
      }
}

TEST_CASE("transfer: the norm counts what is folded as much as the forward form does") {
  TrainPlan plan = plan_of("llama", "completep");
  plan.transfer.base_width /= 2, plan.transfer.base_layers /= 2;
  plan.accumulate = 1;
  const Counting data(10);
  Trainer trainer(plan, data);
  trainer.next_batch(), trainer.forward_backward();
  double squares = 0, plain = 0;
  for (const Parameter& row : trainer.params().rows())
    for (const float g : trainer.params().read(row.grad))
      squares += std::pow(row.norm_mul * double{g}, 2), plain += std::pow(double{g}, 2);
  trainer.update(), trainer.take_loss_and_norm();
  const double tokens = static_cast<double>(trainer.tokens_per_step()),
               scored = static_cast<double>(trainer.last.scored);
  CHECK(trainer.last.norm == doctest::Approx(std::sqrt(squares) * tokens / scored).epsilon(1e-6));
  CHECK(std::abs(std::sqrt(plain / squares) - 1) > 0.01);
}

TEST_CASE("transfer: the table of parameters has the factors, within 80 columns") {
  TrainPlan plan = plan_of("gpt2", "completep");
  plan.transfer.base_width /= 8, plan.transfer.base_layers = 3;
  ParameterTable params;
  declare(params, plan);
  const std::string report = params.report();
  CHECK(report.find("epsilon x 0.125, in the norm x 0.75") != std::string::npos);
  std::istringstream lines(report);
  for (std::string line; std::getline(lines, line);) CHECK_MESSAGE(line.size() <= 80, line);
}

TEST_CASE("transfer: what has no rule, and rules without their base shape, are refused by name") {
  const auto refused = [](const std::string& arch, TransferOptions options, const std::string& words) {
    CAPTURE(arch);
    check_fails(Exit::usage, {words}, [&] { check_transfer(tiny_with(arch), options); });
  };
  const TransferOptions both{"completep", 16, 2}, width{"mup", 16};
  refused("llama", {"mup"}, "needs --base-width");
  refused("llama", {"completep", 16}, "needs --base-layers");
  for (const char* arch : {"mudd", "gemma3n", "moda", "depth_attention"})
    refused(arch, both, str(arch, " has no rule"));
  refused("mhc+lime", width, "mhc+lime, a combination, has no rule");
  refused("llama:loop=anchor", width, "--loop anchor has no rule");
  refused("llama:block_norm=branch", width, "--block-norm branch has no rule");
  refused("llama:engram_layers=[1]:engram_rows=5:engram_heads=2", width, "--engram-layers has no rule");
  refused("lime", width, "lime with kv_init uniform has no rule");
  for (const char* arch : {"llama", "lime:kv_init=normal", "mhc", "satformer"}) check_transfer(tiny_with(arch), both);
  check_transfer(tiny_with("mudd"), {});
}
