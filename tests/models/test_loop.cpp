// Loops: which block runs when, what rows are called, what a loop is equal to. That gradients are the derivatives and
// that generation sees what training sees is checked with all models (tests/support/cases.h).
#include "models/disk/config_json.h"
#include "models/disk/model_dir.h"
#include "models/disk/modelling_file.h"
#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/data_check.h"
#include "tests/support/program.h"
#include "tests/support/routed.h"
#include "tests/support/twin.h"

using namespace crossply;
using namespace crossply::test;

namespace {

Config with_loop(Config config, const LoopOptions& loop) {
  config.loop = loop;
  config.check(Exit::usage, "test");
  return config;
}

// The model in which every run is a block of its own, with the weights of that run. Without a loop of its own where
// nothing happens between runs.
Config unrolled(const Config& config) {
  const Applications all = applications_of(config);
  Config deep = applied(config);
  deep.loop.tied = false;
  if (config.loop.norm == "none" && config.loop.alpha == 0) deep.loop = {};
  deep.check(Exit::usage, "test");
  CHECK(deep.num_hidden_layers == all.count());
  return deep;
}

// A loop has the loss of the unrolled model, and the gradient of a row that of all its copies together.
void check_unrolled(const Config& config) {
  TinyModel loop(config, "reference", PlanMode::reuse, Dtype::f64);
  TinyModel deep(unrolled(config), "reference", PlanMode::reuse, Dtype::f64);
  const RowNames names(config);
  for (const Parameter& row : deep.params.rows()) {
    const auto values = loop.values<double>(loop.params.at(names.of(row.name)).value);
    deep.fill(row.name, [&](int64_t i) { return values[static_cast<size_t>(i)]; });
  }
  CHECK(loop.step() == deep.step());
  std::map<std::string, std::vector<double>> sums;
  for (const Parameter& row : deep.params.rows()) {
    const auto part = deep.values<double>(row.grad);
    std::vector<double>& sum = sums[names.of(row.name)];
    sum.resize(part.size());
    for (size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
  }
  CHECK(sums.size() == loop.params.rows().size());
  for (const Parameter& row : loop.params.rows()) {
    // The same sum in another order; of a key's bias all is rounding.
    if (is_key_bias(row, config)) continue;
    check_close(row.name, loop.values<double>(row.grad), sums.at(row.name), 1e-11);
  }
}

std::vector<std::string> names_of(const Config& config) {
  ParameterTable params;
  declare_model(params, config);
  std::vector<std::string> names;
  for (const Parameter& row : params.rows()) names.push_back(row.name);
  return names;
}

}  // namespace

TEST_CASE("loop: which block runs when") {
  const auto runs = [](const LoopOptions& loop, int64_t L) {
    Config config = tiny_config("llama");
    config.num_hidden_layers = L;
    const Applications all = applications_of(with_loop(config, loop));
    std::string text;
    for (int64_t v = 0; v < all.count(); ++v)
      text += str(all.stored(v), all.pass(v) > 0 ? str("'", all.pass(v)) : "", " ");
    return text;
  };
  CHECK(runs({}, 3) == "0 1 2 ");
  CHECK(runs({"anchor"}, 3) == "0 1 2 ");
  CHECK(runs({"anchor", 2}, 3) == "0 1 1'1 2 ");
  CHECK(runs({"anchor", 2}, 5) == "0 1 2 1'1 2'1 3 4 ");  // thirds: 1, 2, 2
  CHECK(runs({"anchor", 2}, 4) == "0 1 2 1'1 2'1 3 ");
  CHECK(runs({"anchor", 3, "[0,1,2]"}, 3) == "0 0'1 0'2 1 2 ");
}

TEST_CASE("loop: the neutral setting has the bits of the model without a loop, beside every connection") {
  for (const Architecture& architecture : architectures())
    for (const Config& backbone : {tiny_config("llama", 2, true), tiny_gpt2(false)}) {
      const std::string& arch =
          architecture.name == "llama" || architecture.name == "gpt2" ? backbone.backbone : architecture.name;
      CAPTURES(arch, backbone.backbone);
      const Config plain = connected(arch, backbone);
      TinyModel without(plain, "cpu"), with(with_loop(plain, {"anchor", 1, "[]", true, "none", 0}), "cpu");
      CHECK(without.step() == with.step());
      CHECK(without.values<float>(without.params.gradients()) == with.values<float>(with.params.gradients()));
    }
}

TEST_CASE("loop: tied cores are the deeper model whose blocks have the same weights, beside every connection") {
  for (const Case& c : loop_cases())
    if (has_anchor(c.config) && c.config.loop.tied) {
      CAPTURE(c.name);
      check_unrolled(c.config);
      Config repeated = c.config;
      repeated.loop.norm = "none", repeated.loop.alpha = 0;
      check_unrolled(repeated);
    }
}

TEST_CASE("loop: a tied core is stored once; what a connection adds to later passes is of those passes") {
  const Config llama = tiny_config("llama"), lime = tiny_config("lime");
  const LoopOptions twice = {"anchor", 2, "[1,2,1]"};
  CHECK(names_of(with_loop(llama, twice)) == names_of(llama));
  ParameterTable params;
  declare_model(params, with_loop(lime, twice));
  const auto shape = [&](const std::string& name) { return params.at(name).shape; };
  const std::string router = ".self_attn.lime_router.weight";
  CHECK(shape("model.layers.2" + router) == Shape{2, 6});
  CHECK(shape("model.passes.1.layers.1" + router) == Shape{2, 8});
  CHECK(shape("model.passes.1.layers.2" + router) == Shape{2, 10});
  CHECK(shape("model.layers.3" + router) == Shape{2, 12});
  CHECK_FALSE(params.contains("model.passes.1.layers.0" + router));
  // A row goes where no run has it: of the runs 0, 1 2, 1 2, 3 of blocks the first and the third have keys.
  const std::vector<std::string> names = names_of(with_loop(tiny_with("kv_share:sharing=list:kv_owners=[0,2]"), twice));
  const auto has_keys = [&](int block) {
    return std::count(names.begin(), names.end(), layer_name(block, "self_attn.k_proj.weight")) == 1;
  };
  CHECK((has_keys(0) && !has_keys(1) && has_keys(2) && !has_keys(3)));
}

TEST_CASE("loop: what contradicts itself is refused, and a connection without a stream is only repeated") {
  const Config llama = tiny_config("llama");
  const auto refused = [&](const LoopOptions& loop, const char* says) {
    check_fails(Exit::usage, {"test", says}, [&] { with_loop(llama, loop); });
  };
  refused({"ladder"}, "loop 'ladder'");
  refused({"none", 2}, "without a loop");
  refused({"anchor", 0}, "loop_passes");
  refused({"anchor", 1, "[1,2]"}, "loop_layers [1,2]");
  refused({"anchor", 1, "[1,0,3]"}, "the core needs one");
  refused({"anchor", 1, "[1,2,2]"}, "5 blocks, num_hidden_layers is 4");
  refused({"anchor", 1, "[-1,4,1]"}, "loop_layers");
  refused({"anchor", 1, "thirds"}, "loop_layers");
  refused({"anchor", 2, "[]", false}, "they must be given");
  refused({"anchor", 2, "[1,2,1]", false}, "with 2 cores");
  refused({"anchor", 1, "[]", true, "once"}, "loop_norm 'once'");
  refused({"anchor", 1, "[]", true, "passes", INFINITY}, "loop_alpha");
  for (const char* arch : {"attnres", "vertical", "denseformer", "mudd"}) {
    CAPTURE(arch);
    check_fails(Exit::usage, {arch, "no stream", "loop_norm none and loop_alpha 0"},
                [&] { with_loop(tiny_config(arch), {"anchor"}); });
    Config sum = tiny_config(arch);
    sum.block_norm = "sum";
    check_fails(Exit::usage, {arch, "give block_norm branch"}, [&] { sum.check(Exit::usage, "test"); });
  }
  Config other = llama;
  other.block_norm = "post";
  check_fails(Exit::usage, {"block_norm 'post'", "branch"}, [&] { other.check(Exit::usage, "test"); });
}

TEST_CASE("loop: a run says which options have no effect") {
  const auto remark = [](const LoopOptions& loop) { return loop_remark(with_loop(tiny_config("llama"), loop)); };
  CHECK(remark({}).empty());
  CHECK(remark({"anchor"}).empty());
  CHECK(remark({"stack", 2}).empty());
  CHECK(remark({"anchor", 2, "[]", true, "none", 0}).empty());
  CHECK(has(remark({"stack"}), "one pass is the model without a loop"));
  CHECK(has(remark({"anchor", 1, "[]", true, "none", 0}), "changes nothing"));
  CHECK(has(remark({"anchor", 1, "[]", true, "passes", 1, false}), "never added"));
  CHECK(remark({"anchor", 1, "[]", true, "passes", 0}).empty());  // the norms alone
}

TEST_CASE("loop: config.json has what is not as usual, and is read back") {
  for (const Case& c : loop_cases()) {
    CAPTURE(c.name);
    const nlohmann::json json = to_json(c.config);
    const Config back = parse_config(json, "test");
    CHECK((back.loop == c.config.loop && back.block_norm == c.config.block_norm));
    CHECK(json["crossply"].contains("loop") == has_loop(c.config));
    CHECK(json["crossply"].contains("block_norm") == (c.config.block_norm != "pre"));
    CHECK(json["crossply"].contains("loop_end") != c.config.loop.end);
  }
  CHECK_FALSE(to_json(tiny_config("llama")).contains("crossply"));
  CHECK(to_json(with_loop(tiny_config("llama"), {"anchor"}))["crossply"] ==
        R"({"arch": "llama", "loop": "anchor", "qk_norm": false})"_json);
}

TEST_CASE("loop: a model that no modelling file computes carries none, and its refresh is refused in one line") {
  const auto lime = [](const LoopOptions& loop, const std::string& norm = "pre") {
    Config config = tiny_config("lime");
    config.block_norm = norm;
    return with_loop(config, loop);
  };
  CHECK(without_modelling_file(with_loop(tiny_config("llama"), {"anchor", 2})).empty());
  CHECK(without_modelling_file(with_loop(tiny_gpt2(), {"anchor", 2})).empty());
  CHECK(without_modelling_file(lime({"anchor"})).empty());
  CHECK(without_modelling_file(lime({"anchor", 2, "[0,1,2]", false})).empty());
  CHECK(without_modelling_file(lime({}, "sum")).empty());
  Config hyper = tiny_with("hyper");
  hyper.block_norm = "branch";
  CHECK_FALSE(without_modelling_file(hyper).empty());
  const Config looped_lime = lime({"anchor", 2});
  CHECK_FALSE(to_json(looped_lime).contains("auto_map"));
  const TempDir dir;
  save_config(dir.file("config.json"), looped_lime);
  check_fails(Exit::usage, {dir.path.string(), "transformers cannot load this lime", "--loop-tied false"},
              [&] { refresh_model_dir(dir.path.string()); });
}

TEST_CASE("loop: training stops and goes on without a changed bit, and other starts than a random one are refused") {
  const TempDir dir;
  const auto start = [&](const std::string& arch, const std::string& out, std::vector<std::string> more) {
    more.insert(more.end(), {"--out", dir.file(out)});
    return train(dir, more, arch);
  };
  const std::vector<std::string> looped = {"--preset",      "arith-quick", "--data",  "arith:3", "--loop",   "anchor",
                                           "--loop-passes", "2",           "--batch", "4",       "--layers", "3",
                                           "--block-norm",  "branch"};
  const auto steps = [&](const std::string& count) {
    std::vector<std::string> all = looped;
    all.insert(all.end(), {"--schedule", "constant", "--steps", count});
    return all;
  };
  for (const std::string arch : {"llama", "mhc"}) {
    CAPTURE(arch);
    check_outcome(start(arch, arch + ".whole", steps("6")), Exit::done, "");
    check_outcome(start(arch, arch + ".parts", steps("3")), Exit::done, "");
    check_outcome(start(arch, arch + ".parts", {"--resume", "--steps", "6"}), Exit::done, "resumed after step 3");
    for (const char* file : {"/step_00000006/model.safetensors", "/step_00000006/optimizer.safetensors"})
      CHECK(read_text(dir.file(arch + ".whole") + file) == read_text(dir.file(arch + ".parts") + file));
  }
  check_outcome(start("llama", "a", {"--init", dir.file("llama.whole"), "--layers", "2"}), Exit::usage, "has a loop");
  check_outcome(start("lime", "b", {"--init", dir.file("llama.whole")}), Exit::usage, "has a loop");
  check_outcome(start("llama", "c", {"--init", dir.file("llama.whole"), "--loop", "anchor"}), Exit::usage,
                "from scratch");
  check_outcome(start("llama", "d", {"--init", dir.file("llama.whole"), "--data", "arith:3", "--steps", "2"}),
                Exit::done, "");
}

TEST_CASE("block_norm sum: what shortcuts keep of a layer is the stream behind its second norm") {
  Config config = tiny_with("shortcuts:unet=true:attn_saved=1");
  config.block_norm = "sum";
  config.check(Exit::usage, "test");
  Routed r(config);
  const auto output = [&](double backout) {
    r.model.fill("model.backout_lambda", [&](int64_t) { return backout; });
    r.run();
    std::vector<double> all;
    for (int64_t i = 0; i < TinyModel::T * config.hidden_size; ++i) all.push_back(r.at("hidden.4", i));
    return all;
  };
  const std::vector<double> whole = output(0), rest = output(1);
  for (size_t i = 0; i < whole.size(); ++i)  // the output loses layer 2's
    CHECK(whole[i] - rest[i] == doctest::Approx(r.at("hidden.3", static_cast<int64_t>(i))).epsilon(1e-5).scale(1));
}
