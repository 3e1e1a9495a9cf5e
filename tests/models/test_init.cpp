// Starting from another model: every architecture that can start as a plain LLaMA or GPT-2 does so bit for bit, the
// others say why not; fewer blocks; damage stays an error.
#include "models/disk/config_json.h"
#include "models/disk/model_dir.h"
#include "tests/support/data_check.h"
#include "tests/support/program.h"
#include "tests/support/twin.h"

using namespace crossply;
using namespace crossply::test;

namespace {

void save(TinyModel& model, const std::string& dir) {
  save_config(dir + "/config.json", model.config);
  save_tensors(dir + "/model.safetensors", model.params, values_of(model.params, model.config));
}

// A model with `source`'s weights as a trainer starts it, the rest by its own rules.
void start_from(const std::string& dir, TinyModel& model) {
  const Config source = load_config(dir + "/config.json");
  if (source.arch != model.config.arch)
    find_architecture(model.config.arch).make(model.config)->start_as_plain(model.params, model.config);
  model.params.initialise(5);
  load_initial_weights(dir, source, model.config, model.params);
}

// Leaves out a bias of the plain backbone, and says nothing of it.
struct Forgetful : Connection {
  void declare(ParameterTable& params, const Config&) const override {
    params.remove(layer_name(1, "self_attn.k_proj.bias"));
  }
  std::string start_as_plain(ParameterTable&, const Config&) const override { return ""; }
};

const char* able =
    "lime,lime:routing=own,lime:routing=last:window=2,lime:routing=first:window=1,hyper:rate=1:prenorm=rmsnorm,"
    "vertical,"
    "sla:distance=4,ala:stride=4,resformer,resformer:lambda2=frozen,lime:decay=routers,resformer:variant=learnable,"
    "satformer,satformer:gate=tanh,"
    "satformer:gate=identity,denseformer,denseformer:dilation=2:period=3,mudd,mudd:norm=none,relay,"
    "kv_share:cla_factor=1,kv_share:sharing=suffix,depth_attention:depth_start=4,"
    "moda:depth_start=4,moda:depth_start=4:depth_window=1:ffn_kv=false,"
    "gemma3n:embed_scale=none:laurel_rank=0,"
    "gemma3n:embed_scale=none:laurel_form=paper:hidden_size_per_layer_input=6,"
    "shortcuts,shortcuts:x0=false,shortcuts:resid=false:value_embeds=none,"
    "shortcuts:unet=true:value_from=x0:lanes_from=1:mudd_tail=residual";
const char* unable =
    "lime:routing=average,lime:router_init=random,lime:router_bound=literal,lime_static,lime_dynamic,hyper,hyper:rate="
    "2:prenorm=rmsnorm,hyper:rate=1,"
    "vertical:map=unet,vertical:residual=false,sla,ala,resformer:lambda_scale=frozen,resformer:variant=svformer,"
    "resformer:variant=identity,"
    "satformer:gate=sigmoid,mudd:intermediate_sizes=[6,6,6,6],attnres,attnres:attn_res_block_size=0,kv_share,"
    "mhc,mhc:hc_mult=1:mixing=identity:reads=previous,shortcuts:embed_norm=true,shortcuts:attn_saved=1,gated_streams,"
    "gated_streams:hc_count=1,depth_attention,depth_attention:depth_start=3:depth_stride=4,"
    "moda,moda:depth_start=3:depth_window=1:ffn_kv=false,"
    "gemma3n,gemma3n:embed_scale=none,gemma3n:laurel_rank=0:hidden_size_per_layer_input=0";

}  // namespace

TEST_CASE("init: a LLaMA or a GPT-2 becomes every architecture that can start as it, bit for bit") {
  for (const Config& from :
       {tiny_config("llama", 2, true), tiny_config("llama", 4, true), tiny_qwen2(), tiny_gpt2(), tiny_gpt2(false)}) {
    const TempDir dir;
    TinyModel plain(from, "cpu");
    save(plain, dir.path.string());
    const double want = plain.loss();
    // A plain GPT-2 adds a bias to product and stream together; who writes to streams in another way, to the product.
    const double rounding = from.gpt2() && from.bias ? 1e-6 : 0;
    const auto equals = [&](double loss) { return std::abs(loss - want) <= rounding; };
    std::set<std::string> seen = {"llama", "gpt2"};
    for (const ArchChoice& choice : parse_arch_list(able)) {
      CAPTURE(choice.text);
      TinyModel model(connected(choice.text, from), "cpu");
      start_from(dir.path.string(), model);
      if (choice.arch == "hyper" || has(choice.text, "lanes_from")) CHECK(equals(model.loss()));
      else CHECK(model.loss() == want);
      seen.insert(choice.arch);
    }
    for (const ArchChoice& choice : parse_arch_list(unable)) {
      CAPTURE(choice.text);
      check_fails(Exit::usage, {choice.arch}, [&] {
        TinyModel model(connected(choice.text, from), "cpu");
        start_from(dir.path.string(), model);
      });
      seen.insert(choice.arch);
    }
    for (const Architecture& one : architectures()) {
      if (seen.contains(one.name)) continue;
      CAPTURE(one.name);
      CHECK(one.draft);
      TinyModel model(connected(one.name, from), "cpu");
      const Exit code = error_of([&] { start_from(dir.path.string(), model); }).code;
      CHECK((code == Exit::usage || (code == Exit::done && equals(model.loss()))));  // or it says that it cannot
    }
  }
}

TEST_CASE("init: an architecture that has no place for one of the plain model's tensors is refused with its name") {
  const TempDir dir;
  TinyModel plain(tiny_qwen2(), "cpu");
  save(plain, dir.path.string());
  architectures().push_back({"forgetful", "", {}, [](const Config&) { return std::make_unique<Forgetful>(); }, true});
  TinyModel model(connected("forgetful", tiny_qwen2()), "cpu");
  check_fails(Exit::usage, {"model.layers.1.self_attn.k_proj.bias", "no place in a forgetful"},
              [&] { start_from(dir.path.string(), model); });
  architectures().pop_back();
}

TEST_CASE("init: the first blocks of a model are that model without the last ones") {
  for (const std::string arch : {"llama", "lime", "denseformer", "gpt2"}) {
    CAPTURE(arch);
    const TempDir dir;
    TinyModel whole(tiny_config(arch), "cpu");
    save(whole, dir.path.string());
    Config config = whole.config;
    config.num_hidden_layers = 2;
    TinyModel want(config, "cpu"), got(config, "cpu");
    want.take(whole);
    got.params.initialise(5);
    start_from(dir.path.string(), got);
    CHECK(got.loss() == want.loss());
    for (const Parameter& row : got.params.rows())
      CHECK(got.values<float>(row.value) == want.values<float>(want.params.at(row.name).value));
  }
}

TEST_CASE("init: a damaged directory stays an error, whatever it is to become") {
  const TempDir dir;
  TinyModel llama(tiny_config("llama"), "cpu"), lime(tiny_config("lime"), "cpu");
  save(llama, dir.path.string());
  const std::string path = dir.file("model.safetensors"), name = "model.layers.1.mlp.up_proj.weight";
  std::vector<float> host(8, 1);
  write_safetensors(path, {{"model.norm.weight", "F32", {8}, host.data()}});
  check_fails(Exit::bad_data, {path, "is missing"}, [&] { start_from(dir.path.string(), lime); });
  llama.params.remove(name);
  save_tensors(path, llama.params, values_of(llama.params, llama.config));
  check_fails(Exit::bad_data, {path, name}, [&] { start_from(dir.path.string(), lime); });
  TinyModel routed(tiny_config("lime"), "cpu");
  // A lime's tensors under a llama's config.
  save_tensors(path, routed.params, values_of(routed.params, routed.config));
  check_fails(Exit::bad_data, {path, "lime_router"}, [&] { start_from(dir.path.string(), lime); });
}

TEST_CASE("init: what belongs to the model survives training on token shards, and data of other ids is refused") {
  const TempDir dir;
  const std::string from = dir.file("model"), text = dir.file("text"), out = dir.file("run");
  std::filesystem::create_directory(from);
  Config config = tiny_config("llama");
  config.vocab_size = 256;
  config.token_ids["eos_token_id"] = "[7,9]";
  TinyModel model(config, "cpu");
  save(model, from);
  write_text(from + "/generation_config.json", "{\"eos_token_id\": [7, 9]}");
  write_text(from + "/tokenizer.json", R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]}})");
  write_text(text, std::string(400, 'x'));
  const auto start = [&](const std::string& arch, const std::string& init, const std::string& run,
                         std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--init", init, "--out", run, "--data", "text:" + text, "--seq", "5", "--batch", "2",
                             "--eval-samples", "1"});
    return train(dir, more, arch);
  };
  const std::vector<std::string> two = {"--steps", "2"};
  for (const char* says : {from.c_str(), "text:", "BPE", "bytes", "token shards"})
    check_outcome(start("lime", from, out, two), Exit::usage, says);
  CHECK(!std::filesystem::exists(out));
  Tokenizer::words({"a", "b"}).save(from);
  for (const char* says : {from.c_str(), "2 words (a b", "bytes"})
    check_outcome(start("lime", from, out, two), Exit::usage, says);
  Tokenizer::bytes().save(from);
  const std::string own = read_text(from + "/tokenizer.json") + "\n";
  write_text(from + "/tokenizer.json", own);
  check_outcome(start("lime", from, out, two), Exit::done, "note: lime starts as the llama of " + from);
  const std::string saved = out + "/step_00000002/";
  CHECK(read_text(saved + "tokenizer.json") == own);
  CHECK(read_text(saved + "generation_config.json") == read_text(from + "/generation_config.json"));
  const Config after = load_config(saved + "config.json");
  CHECK((after.arch == "lime" && after.token_ids.at("eos_token_id") == "[7,9]"));
  const std::string other = dir.file("two");
  for (const char* says : {"--layers 5", "4 blocks"})
    check_outcome(start("lime", out, other, {"--steps", "3", "--layers", "5"}), Exit::usage, says);
  check_outcome(start("lime", out, other, {"--steps", "3", "--layers", "2"}), Exit::done,
                "the first 2 of its 4 blocks");
  CHECK(load_config(other + "/step_00000003/config.json").num_hidden_layers == 2);
  for (const std::string& says : {out, std::string("lime"), std::string("mudd")})
    check_outcome(start("mudd", out, dir.file("three")), Exit::usage, says);
}
