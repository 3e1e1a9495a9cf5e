// Models made of other models' blocks: which numbers come along, which are a new model's, and what they compute.

#include "engine/io/safetensors.h"
#include "eval/loaded_model.h"
#include "models/disk/checkpoint.h"
#include "models/registry.h"
#include "models/transplant.h"
#include "tests/support/program.h"
#include "tests/support/tiny.h"

using namespace crossply;
using namespace crossply::test;

namespace {

Config small_gpt2(bool bias = true, bool scaled = false) {
  Config config = tiny_config("gpt2", /*K=*/4);
  config.intermediate_size = 32;
  config.max_position_embeddings = 9;
  config.bias = bias;
  config.scale_attn_by_inverse_layer_idx = scaled;
  config.check(Exit::usage, "test");
  return config;
}

using Blocks = std::vector<int>;
constexpr uint64_t new_seed = 3;

// A source with numbers that no new model has, and what becomes of it.
struct Made {
  Made(const Config& config, const Transplant& t, int64_t C = 0, int64_t H = 0)
      : source(config), target(transplanted_config(config, t, C, H)), device(make_device("cpu")) {
    for (ParameterTable* table : {&from, &to, &fresh}) {
      declare_model(*table, table == &from ? source : target);
      table->allocate(*device, Dtype::f32, false);
      table->initialise(new_seed);
    }
    for (const Parameter& row : from.rows()) {
      std::vector<double> values;
      for (int64_t i = 0; i < row.shape.numel(); ++i)
        values.push_back(random_normal(1, stream_of(row.name), static_cast<uint64_t>(i)));
      from.write(row, values.data());
    }
    kept = transplant(from, source, to, target, t);
  }
  // Is the row the source's of this name, or the leading part of it; or is it a new model's?
  bool is_from(const std::string& row, const std::string& theirs) {
    const Shape own = to.at(row).shape, all = from.at(theirs).shape;
    const auto got = to.read(to.at(row).value), want = from.read(from.at(theirs).value);
    const int64_t width = own[own.rank - 1], stride = all[all.rank - 1];
    for (int64_t i = 0; i < own.numel(); ++i)
      if (got[static_cast<size_t>(i)] != want[static_cast<size_t>(i / width * stride + i % width)]) return false;
    return true;
  }
  bool is_new(const std::string& row) { return to.read(to.at(row).value) == fresh.read(fresh.at(row).value); }

  Config source, target;
  std::unique_ptr<Device> device;
  ParameterTable from, to, fresh;
  std::vector<std::string> kept;
};

// What a row of a plain model is, told apart by what its name holds.
std::string plain_part(const std::string& row) {
  const std::vector<std::pair<std::string, std::string>> parts = {{"self_attn", "attention"},
                                                                  {"mlp.", "mlp"},
                                                                  {"input_layernorm", "attention_norm"},
                                                                  {"post_attention", "mlp_norm"},
                                                                  {"positions", "positions"},
                                                                  {"model.norm", "final_norm"}};
  for (const auto& [piece, part] : parts)
    if (has(row, piece)) return part;
  return "embedding";
}

// Every row of a plain model against what the list and the parts say of it.
void check_rows(const Config& config, const Blocks& blocks, const std::set<std::string>& parts) {
  Made made(config, {blocks, parts});
  CHECK(made.kept.empty());
  for (const Parameter& row : made.to.rows()) {
    CAPTURE(row.name);
    const std::string layers = "model.layers.";
    const bool in_block = row.name.starts_with(layers);
    const int to = in_block ? row.name[layers.size()] - '0' : 0, from = in_block ? blocks[static_cast<size_t>(to)] : 0;
    const bool inherited = from != fresh_block && parts.contains(plain_part(row.name));
    std::string theirs = row.name;
    if (in_block && inherited) theirs[layers.size()] = static_cast<char>('0' + from);
    CHECK((inherited ? made.is_from(row.name, theirs) : made.is_new(row.name)));
  }
}

// The tensors of a connection that start fresh, though asked for.
std::vector<std::string> left_out(const std::string& choice, const Blocks& blocks) {
  return Made(tiny_with(choice, 2, false), {blocks}).kept;
}

}  // namespace

TEST_CASE("a list of blocks is read as written, and an entry that is no block is named") {
  CHECK(parse_blocks("0-2,0-2", 3) == Blocks{0, 1, 2, 0, 1, 2});
  CHECK(parse_blocks("0,2,4,2-3,4-4", 5) == Blocks{0, 2, 4, 2, 3, 4});
  CHECK(parse_blocks("fresh:2,2-3,fresh:1", 4) == Blocks{-1, -1, 2, 3, -1});
  for (const char* bad : {"4", "0-4", "2-1", "-1", "1-", "a", "1 ", "0x1", "fresh:", "fresh:0", "fresh:-1",
                          "fresh:4097", "fresh", "99999999999999999999", "--", "1-2-3"}) {
    check_fails(Exit::usage, {str("'", bad, "'"), "0 to 3"}, [&] { parse_blocks(bad, 4); });
    check_fails(Exit::usage, {str("'", bad, "'")}, [&] { parse_blocks(std::string("0,") + bad, 4); });
  }
  for (const char* bad : {"", ",", "0,", "0,,1"}) check_fails(Exit::usage, {"''"}, [&] { parse_blocks(bad, 4); });
}

TEST_CASE("each block keeps its attention window, wherever it comes to stand") {
  Config config = tiny_config("llama");
  config.sliding_window = 3, config.window_pattern = "SLSS";
  config.check(Exit::usage, "test");
  const auto windows_of = [&](const Blocks& blocks) {
    const Config made = transplanted_config(config, {blocks});
    return str(made.sliding_window, " ", made.window_pattern);
  };
  CHECK(windows_of({0, 1, 2, 3, 2, 3}) == "3 SLSSSS");
  CHECK(windows_of({3, 2}) == "3 SS");
  CHECK(windows_of({1, fresh_block, 0, fresh_block}) == "3 LLSS");
  CHECK(windows_of({fresh_block, 1}) == "3 SL");
  CHECK(windows_of({1, 1}) == "0 " + Config().window_pattern);  // none has one
}

TEST_CASE("blocks and parts: what the list and the names say comes along, the rest is a new model's bit for bit") {
  const std::set<std::string> all(transplant_parts.begin(), transplant_parts.end());
  const std::vector<std::set<std::string>> choices = {all,
                                                      {"embedding", "attention", "attention_norm"},
                                                      {"embedding", "attention", "mlp"},
                                                      {"embedding", "mlp", "mlp_norm"},
                                                      {"positions"},
                                                      {"final_norm"}};
  const std::vector<Config> configs = {small_gpt2(), small_gpt2(/*bias=*/false), tiny_config("llama", 2, true, false)};
  for (const Config& config : configs)
    for (const Blocks& blocks :
         std::vector<Blocks>{{0, 1, 2, 3}, {0, 1}, {0, 1, 0, 1}, {0, 2, 3, 2, 3}, {-1, -1, 2, 3}})
      for (const std::set<std::string>& parts : choices) check_rows(config, blocks, parts);
}

TEST_CASE("what starts fresh is not what a source of the same seed began with") {
  Made made(small_gpt2(), {Blocks(4, fresh_block)});
  const auto same = [&](const std::string& name) { return made.is_new(name); };
  for (const uint64_t seed : {new_seed, new_seed + 1, new_seed}) {
    initialise_fresh(made.to, seed);
    for (const char* name : {"model.embed_positions.weight", "model.layers.1.mlp.up_proj.weight"}) CHECK(!same(name));
    CHECK(same("model.norm.weight"));
  }
  const auto first = made.to.read(made.to.values());
  initialise_fresh(made.to, new_seed);
  CHECK(made.to.read(made.to.values()) == first);
}

TEST_CASE("residual projections that start fresh have the spread of the new depth") {
  Made made(small_gpt2(), {Blocks(16, fresh_block)});  // 16 blocks: a quarter of the variance of 4
  const Config& c = made.target;
  CHECK(c.num_hidden_layers == 16);
  CHECK(made.to.at("model.layers.15.mlp.down_proj.weight").init.rule ==
        Init::normal(c.initializer_range / std::sqrt(32.0)).rule);
  CHECK(made.is_new("model.layers.15.mlp.down_proj.weight"));
}

TEST_CASE("half width takes the first heads, channels and hidden units of every tensor") {
  const Blocks all = {0, 1, 2, 3};
  for (const Config& config : {small_gpt2(), tiny_config("llama", 2, true, false), tiny_config("llama", 1)}) {
    Made made(config, {all}, 4);
    CHECK(made.kept.empty());
    const Config& c = made.target;
    const int64_t D = config.head_dim, K = config.num_key_value_heads == 1 || !config.gpt2() ? 1 : 2;
    CHECK(c.hidden_size == 4);
    CHECK(c.num_attention_heads == 2);
    CHECK(c.num_key_value_heads == K);
    CHECK(c.head_dim == D);
    CHECK(c.intermediate_size == config.intermediate_size / 2);
    CHECK(made.to.at("model.layers.1.self_attn.k_proj.weight").shape == Shape{K * D, 4});
    CHECK(made.to.at("model.layers.1.mlp.down_proj.weight").shape == Shape{4, config.intermediate_size / 2});
    for (const Parameter& row : made.to.rows()) CHECK_MESSAGE(made.is_from(row.name, row.name), row.name);
  }
  // A query head keeps its key head: of 4 heads with 2, head 1 has key head 0, head 2 has key head 1.
  const Transplant t{all};
  CHECK(transplanted_config(tiny_config("llama", 2), t, 8, 2).num_key_value_heads == 1);
  CHECK(transplanted_config(tiny_config("llama", 2), t, 8, 1).num_key_value_heads == 1);
  check_fails(Exit::usage, {"--heads 3", "multiple of 2"},
              [&] { transplanted_config(tiny_config("llama", 2), t, 8, 3); });
  check_fails(Exit::usage, {"--width 9", "width 8"}, [&] { transplanted_config(small_gpt2(), t, 9); });
  check_fails(Exit::usage, {"--heads 5", "4 heads"}, [&] { transplanted_config(small_gpt2(), t, 8, 5); });
  check_fails(Exit::usage, {"--width 5", "2 x 2", "--width 4"}, [&] { transplanted_config(small_gpt2(), t, 5); });
  check_fails(Exit::usage, {"--heads 2", "--width 4"}, [&] { transplanted_config(small_gpt2(), t, 8, 2); });
}

TEST_CASE("rescaled queries: a moved block computes what it computed before, and without them it does not") {
  for (const bool bias : {true, false}) {
    const Config config = small_gpt2(bias, /*scaled=*/true);
    TinyModel source(config);
    // Of four blocks only number 2 does something; its logits are large enough to matter.
    for (const int silent : {0, 1, 3})
      for (const char* output : {"self_attn.o_proj.", "mlp.down_proj."})
        for (const char* kind : {"weight", "bias"})
          if (source.params.contains(layer_name(silent, str(output, kind))))
            source.fill(layer_name(silent, str(output, kind)), [](int64_t) { return 0; });
    const auto queries = source.values<float>(source.params.at(layer_name(2, "self_attn.q_proj.weight")).value);
    source.fill(layer_name(2, "self_attn.q_proj.weight"),
                [&](int64_t i) { return 8 * queries[static_cast<size_t>(i)]; });
    source.loss();
    const auto want = source.values<float>(source.graph.losses->tensor);
    for (const bool rescale : {true, false}) {
      Transplant t{{0, 2}};  // 2 as 1: times 2 / 3
      t.rescale_queries = rescale;
      const Config target = transplanted_config(config, t);
      TinyModel moved(target);
      transplant(source.params, config, moved.params, target, t);
      moved.loss();
      const auto got = moved.values<float>(moved.graph.losses->tensor);
      if (rescale) check_close("losses", got, want, 1e-6);
      double most = 0;
      for (size_t i = 0; i < got.size(); ++i) most = std::max(most, std::abs(static_cast<double>(got[i] - want[i])));
      if (!rescale) CHECK(most > 1e-3);
    }
  }
}

TEST_CASE(
    "every architecture: all blocks with all parts are the source bit for bit, and so is a first part of a model") {
  for (const Architecture& architecture : architectures()) {
    for (const bool gpt2 : {false, true}) {
      if (architecture.name == (gpt2 ? "llama" : "gpt2")) continue;
      CAPTURE(architecture.name);
      Config config = gpt2 ? small_gpt2() : tiny_config(architecture.name);
      config.arch = architecture.name;
      config.check(Exit::usage, "test");
      Made made(config, {{0, 1, 2, 3}});
      CHECK(made.kept.empty());
      for (const Parameter& row : made.to.rows()) CHECK_MESSAGE(made.is_from(row.name, row.name), row.name);
    }
  }
  for (const char* choice : {"lime", "denseformer", "vertical", "satformer", "hyper:rate=2"})
    CHECK_MESSAGE(left_out(choice, {0, 1, 2}).empty(), choice);
}

TEST_CASE("what a connection added follows its block where it fits, and the rest is told") {
  using Names = std::vector<std::string>;
  CHECK(left_out("lime", {0, 1, 0, 1}) ==
        Names{layer_name(2, "self_attn.lime_router.weight"), layer_name(3, "self_attn.lime_router.weight")});
  CHECK(left_out("denseformer", {1, 2}) ==
        Names{"model.dwa_modules.alphas.0.weight", "model.dwa_modules.alphas.1.weight"});
  Made lazy(tiny_with("denseformer", 2, false), {{fresh_block, 1, 2}});
  CHECK(lazy.kept.empty());
  CHECK(lazy.is_new("model.dwa_modules.alphas.0.weight"));
  CHECK(lazy.is_from("model.dwa_modules.alphas.1.weight", "model.dwa_modules.alphas.1.weight"));
  // Of the same shape, but over other layers' outputs.
  Config dilated = tiny_config("denseformer");
  dilated.num_hidden_layers = 9, dilated.options["dilation"] = "4";
  dilated.check(Exit::usage, "test");
  Made exchanged(dilated, {{0, 1, 2, 3, 5, 4, 6, 7, 8}});
  const Names alphas = {"model.dwa_modules.alphas.4.weight", "model.dwa_modules.alphas.5.weight"};
  CHECK(exchanged.kept == alphas);
  CHECK(exchanged.from.at(alphas[0]).shape == exchanged.from.at(alphas[1]).shape);
  for (const std::string& name : alphas) CHECK(exchanged.is_new(name));
  CHECK(exchanged.is_from("model.dwa_modules.alphas.6.weight", "model.dwa_modules.alphas.6.weight"));
  // Gates of streams go along, those of both sublayers.
  Made streams(tiny_with("mhc", 2, false), {{0, 2, 1, 3}});
  for (const char* rows : {"attn_hc.fn", "ffn_hc.fn", "ffn_hc.base", "ffn_hc.scale"})
    CHECK(streams.is_from(layer_name(1, rows), layer_name(2, rows)));
  // A gate on the first layer's values goes along.
  const std::string gate = ".self_attn.value_residual_mixing.alpha_proj.weight";
  Made gates(tiny_with("satformer", 2, false), {{0, 2, 1, 3}});
  CHECK(gates.kept.empty());
  CHECK(gates.is_from("model.layers.1" + gate, "model.layers.2" + gate));
  // For all blocks together: only with all of them.
  const Names lambdas = {"model.lambda_manager.lambda_scale", "model.lambda_manager.lambda_logits"};
  CHECK(left_out("resformer:variant=plus", {3, 2, 1, 0}).size() >= 2);
  Made reversed(tiny_with("resformer:variant=plus", 2, false), {{0, 2, 1, 3}});
  CHECK(reversed.kept == lambdas);
  for (const std::string& name : lambdas) CHECK(reversed.is_new(name));
  // A feed-forward layer of another size is not cut: MUDDFormer's may grow with depth.
  Config grown = tiny_config("mudd");
  grown.options["intermediate_sizes"] = "[6,8,10,12]";
  Made mudd(grown, {{3, 1, 2, 0}});
  const std::string up = layer_name(0, "mlp.up_proj.weight");
  CHECK(std::count(mudd.kept.begin(), mudd.kept.end(), up) == 1);
  CHECK(mudd.is_new(up));
  CHECK(mudd.is_from(layer_name(0, "input_layernorm_k.weight"), layer_name(3, "input_layernorm_k.weight")));
  CHECK(transplant_part(layer_name(0, "input_layernorm_k.weight")) == "attention_norm");
  CHECK(transplant_part(layer_name(0, "lime_layernorm.weight")) == "connection");
  // An Engram stays at its place.
  Config engram = tiny_config("llama");
  engram.engram.layers = "[1]", engram.engram.rows = 8, engram.engram.heads = 2;
  engram.check(Exit::usage, "test");
  Made moved(engram, {{0, fresh_block, 3}});
  CHECK(moved.kept.empty());
  for (const char* rest : {"engram.embed.weight", "engram.wkv.weight"})
    CHECK(moved.is_from(layer_name(1, rest), layer_name(1, rest)));
}

namespace {

// The program's source: a GPT-2 of 4 blocks with a tokenizer and a file that it carries.
std::string make_source(const TempDir& scratch) {
  const std::string dir = scratch.file("source");
  check_outcome(train(scratch,
                      {"--data", "arith:3", "--train-samples", "8", "--test-samples", "4", "--width", "16", "--layers",
                       "4", "--heads", "4", "--scale-attn-by-layer", "true", "--steps", "0", "--out", dir},
                      "gpt2"),
                Exit::done, "wrote");
  write_text(dir + "/generation_config.json", "{\"top_k\": 5}\n");
  std::filesystem::remove(dir + "/manifest.json");  // which lists another one
  return dir;
}

Outcome run_transplant(const TempDir& scratch, const std::string& source, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"transplant", "--model", source, "--out", scratch.file("made")});
  return run_program_inside(scratch, arguments);
}

}  // namespace

TEST_CASE("transplant: all of a model is its copy; lists, parts and widths are told in lines of 80 columns") {
  const TempDir scratch;
  const std::string source = make_source(scratch), made = scratch.file("made");
  check_outcome(run_transplant(scratch, source, {}), Exit::done, "blocks: 0-3 <- 0-3\n");
  for (const char* file : {"/model.safetensors", "/config.json", "/tokenizer.json", "/generation_config.json"})
    CHECK_MESSAGE(read_text(source + file) == read_text(made + file), file);
  std::string why;
  CHECK_MESSAGE(is_valid_checkpoint(made, &why), why);
  check_outcome(run_transplant(scratch, source, {"--blocks", "0"}), Exit::usage, "exists and is not empty");
  CHECK(read_text(source + "/model.safetensors") == read_text(made + "/model.safetensors"));
  // The source has never been trained, and has the seed that is the program's, too.
  std::filesystem::remove_all(made);
  check_outcome(run_transplant(scratch, source, {"--blocks", "fresh:2,2-3"}), Exit::done, "0-1 fresh");
  LoadedModel old(source, "cpu", false), fresh(made, "cpu", false);
  for (int block = 0; block < 4; ++block) {
    const std::string name = layer_name(block, "self_attn.q_proj.weight");
    CHECK((old.params.read(old.params.at(name).value) == fresh.params.read(fresh.params.at(name).value)) ==
          (block > 1));
  }

  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--blocks", "0-1,0-1"}, "blocks: 0-1 <- 0-1, 2-3 <- 0-1\n"},
      {{"--blocks", "0-1,0-1"}, "1/3 (2 <- 0) to 2/4 (3 <- 1)"},
      {{"--blocks", "fresh:2,2-3"}, "blocks: 0-1 fresh, 2-3 <- 2-3\n"},
      {{"--blocks", "3,0"}, "1/2 (1 <- 0) to 4/1 (0 <- 3)"},
      {{"--blocks", "0,2,3", "--inherit", "embedding,mlp"}, "blocks: 0 <- 0, 1-2 <- 2-3\n"},
      {{"--inherit", "embedding,mlp"}, "fresh, not in --inherit: attention, attention_norm, final_norm, mlp_norm"},
      {{"--rescale-q", "true"}, "--rescale-q has nothing to do"},
      {{"--width", "8"}, "4 blocks, width 8, 2 heads,"}};
  for (const auto& [arguments, says] : cases) {
    std::filesystem::remove_all(made);
    const Outcome outcome = run_transplant(scratch, source, arguments);
    check_outcome(outcome, Exit::done, says);
    check_width(outcome, scratch);
    CHECK_MESSAGE(is_valid_checkpoint(made, &why), why);
    CHECK((has(outcome.output, "note: logits") == (arguments[1] == "0-1,0-1" || arguments[1] == "3,0")));
  }
}

TEST_CASE("transplant: bad input ends with one line, the documented code, and nothing made") {
  const TempDir scratch;
  const std::string source = make_source(scratch);
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--blocks", "0-4"}, "'0-4' is neither a block, 0 to 3"},
      {{"--blocks", ""}, "'' is neither"},
      {{"--blocks", "fresh:4096,0-3"}, "n_layer"},
      {{"--inherit", "atention"}, "'atention'; known: embedding, positions"},
      {{"--inherit", ""}, "no part is called ''"},
      {{"--inherit", "embedding,connection"}, "--inherit connection: the source has nothing"},
      {{"--inherit", "embedding,mlp", "--blocks", "fresh:2"}, "--inherit mlp: the source has nothing"},
      {{"--width", "32"}, "the source has width 16 and 4 heads"},
      {{"--width", "6"}, "as wide as its heads, 1 x 4"},
      {{"--width", "8", "--heads", "4"}, "as wide as its heads, 4 x 4"},
      {{"--heads", "0x2"}, "not an integer"},
      {{"--rescale-q", "maybe"}, "maybe"}};
  for (const auto& [arguments, says] : cases) {
    const Outcome outcome = run_transplant(scratch, source, arguments);
    check_outcome(outcome, Exit::usage, says);
    CHECK(!path_exists(scratch.file("made")));
  }
  check_outcome(run_transplant(scratch, scratch.file("none"), {}), Exit::no_input, "no such directory");
  write_text(source + "/model.safetensors", "cut short");
  check_outcome(run_transplant(scratch, source, {}), Exit::bad_data, "model.safetensors");
  for (const auto& entry : std::filesystem::directory_iterator(scratch.path))
    CHECK_MESSAGE((entry.path().filename() == "source" || entry.path().filename() == "output"), entry.path());
}

TEST_CASE("transplant and --init: a weight that fp32 cannot hold is refused by name, place and value") {
  const TempDir scratch;
  const std::string source = make_source(scratch), made = scratch.file("made"), file = source + "/model.safetensors";
  std::filesystem::remove(source + "/manifest.json");
  std::vector<TensorInfo> infos;
  std::vector<std::vector<double>> values;
  std::string broken;
  {
    const SafetensorsFile old(file);
    infos = old.tensors();
    for (const TensorInfo& info : infos) {
      values.emplace_back(static_cast<size_t>(info.numel()));
      old.read_f64(info, values.back().data());
    }
  }
  const auto write = [&] {
    std::vector<TensorToWrite> all;
    for (size_t i = 0; i < infos.size(); ++i) all.push_back({infos[i].name, "F64", infos[i].shape, values[i].data()});
    write_safetensors(file, all);
  };
  write();
  check_outcome(run_transplant(scratch, source, {}), Exit::done, "wrote");
  std::filesystem::remove_all(made);
  const auto init = [&] {
    return train(scratch, {"--init", source, "--data", "arith:3", "--steps", "0", "--out", made}, "gpt2");
  };
  for (const double bad : {1e300, -3.5e38, double{INFINITY}, double{NAN}}) {
    CAPTURE(bad);
    values[2][1] = bad;
    write();
    for (const Outcome& outcome : {run_transplant(scratch, source, {}), init()}) {
      check_outcome(outcome, Exit::bad_data, infos[2].name);
      check_outcome(outcome, Exit::bad_data, str(bad, " at its element 1"));
      CHECK(!path_exists(made));
    }
  }
}
