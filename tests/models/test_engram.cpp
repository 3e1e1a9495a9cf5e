// Engram: the hash against numbers that were worked out elsewhere, its boundaries and maps; models that write nothing
// are plain ones; generation, a start from another model, files and refusals.
#include <set>

#include "engine/io/json.h"
#include "eval/decode.h"
#include "models/disk/config_json.h"
#include "tests/support/cases.h"
#include "tests/support/data_check.h"
#include "tests/support/program.h"
#include "tests/support/tiny_run.h"
#include "train/settings/settings.h"

using namespace crossply;
using namespace crossply::test;

namespace {

Config hashing(const EngramOptions& engram, int64_t V = 7) {
  Config config = tiny_config("llama");
  config.vocab_size = V, config.engram = engram;
  if (!has_engram(config)) config.engram.layers = "[1]";
  config.check(Exit::usage, "test");
  return config;
}

std::vector<int32_t> rows_of(const EngramHash& hash, const std::vector<int32_t>& tokens, int64_t before = 0) {
  const int64_t count = std::ssize(tokens) - before;
  std::vector<int32_t> rows(static_cast<size_t>(count * hash.columns()));
  hash.rows_of(rows.data(), tokens.data() + before, count, before);
  return rows;
}
// Those of the tokens from `first` on.
std::vector<int32_t> tail_of(const EngramHash& hash, const std::vector<int32_t>& rows, int64_t first) {
  return {rows.begin() + first * hash.columns(), rows.end()};
}

}  // namespace

// By transformers' qwen4_exp.
TEST_CASE("engram: multipliers and rows are those of a published implementation") {
  const EngramHash hash(hashing({.heads = 2}, 50257), 0);
  CHECK(hash.multipliers() == std::vector<int64_t>{38575058880125, 170353649319747, 84843994628913});
  CHECK(hash.table_rows() == 262170);
  CHECK(rows_of(hash, {3, 1, 4, 1, 5}) == std::vector<int32_t>{40620,  76942,  140784, 232708, 40098,  103799, 156089,
                                                               219745, 40695,  104404, 182911, 247408, 31853,  78386,
                                                               186027, 199510, 51471,  122338, 139023, 232031});
}

TEST_CASE("engram: each table has a prime of its own, over all Engrams of a model") {
  const Config config = hashing({.layers = "[0,2]", .heads = 2, .rows = 5});
  CHECK(EngramHash(config, 0).table_rows() == 5 + 7 + 11 + 13);
  CHECK(EngramHash(config, 1).table_rows() == 17 + 19 + 23 + 29);
  CHECK(EngramHash(config, 0).multipliers() != EngramHash(config, 1).multipliers());
  ParameterTable params;
  declare_model(params, config);
  CHECK(params.at("model.layers.2.engram.embed.weight").shape == Shape{88, 2});
  CHECK(params.at("model.layers.2.engram.wkv.weight").shape == Shape{16, 8});
}

TEST_CASE("engram: given multipliers replace the drawn ones, beyond what a double holds, too") {
  const EngramOptions drawn{.heads = 2, .rows = 100, .seed = 9};
  const EngramHash hash(hashing(drawn), 0);
  EngramOptions given = drawn;
  given.seed = 0,
  given.multipliers = str("[[", hash.multipliers()[0], ",", hash.multipliers()[1], ",", hash.multipliers()[2], "]]");
  const std::vector<int32_t> text{1, 6, 2, 2, 0, 5};
  CHECK(rows_of(EngramHash(hashing(given), 0), text) == rows_of(hash, text));
  CHECK(rows_of(EngramHash(hashing({.heads = 2, .rows = 100}), 0), text) != rows_of(hash, text));
  given.multipliers = "[[9007199254740993,1,1]]";  // 2^53 + 1
  CHECK(EngramHash(hashing(given), 0).multipliers()[0] == 9007199254740993);
  CHECK(parse_config(to_json(hashing(given)), "c").engram == hashing(given).engram);
}

TEST_CASE("engram: nothing is looked back to beyond a boundary, which itself belongs to what it ends") {
  const EngramHash hash(hashing({.order = 4, .heads = 1, .width = 3, .rows = 1000, .boundary = "[3]", .pad_id = 5}), 0);
  const auto all = rows_of(hash, {1, 2, 3, 4, 6, 1});
  CHECK(tail_of(hash, all, 3) == rows_of(hash, {4, 6, 1}));
  CHECK(tail_of(hash, rows_of(hash, {0, 0, 3, 4, 6, 1}), 3) == tail_of(hash, all, 3));
  // Its own n-grams have what stands before it.
  CHECK(tail_of(hash, rows_of(hash, {1, 2, 3}), 2) != tail_of(hash, rows_of(hash, {0, 2, 3}), 2));
  // In front of the first token there are pads.
  const EngramHash free(hashing({.order = 4, .heads = 1, .width = 3, .rows = 1000, .pad_id = 5}), 0);
  CHECK(tail_of(free, rows_of(free, {5, 5, 5, 4, 6, 1}), 3) == rows_of(free, {4, 6, 1}));
  // A text in two parts has the rows of the whole.
  for (int64_t before = 1; before < 6; ++before)
    CHECK(rows_of(hash, {1, 2, 3, 4, 6, 1}, before) == tail_of(hash, all, before));
}

TEST_CASE("engram: tokens of one number are the same, the pad's, too") {
  const EngramHash hash(hashing({.heads = 2, .rows = 1000, .pad_id = 6, .map = "[0,1,2,0,3,1,4]"}), 0);
  CHECK(rows_of(hash, {0, 1, 2, 4}) == rows_of(hash, {3, 5, 2, 4}));
  CHECK(rows_of(hash, {0, 1, 2, 4}) != rows_of(hash, {0, 1, 2, 6}));
  CHECK(tail_of(hash, rows_of(hash, {6, 6, 1}), 2) == rows_of(hash, {1}));
  CHECK_THROWS_AS(rows_of(hash, {1, 7}), Error);
  CHECK_THROWS_AS(rows_of(hash, {-1}), Error);
}

TEST_CASE("engram: with values of zeros a model is what it is without, bit for bit, and they learn") {
  for (const std::string choice : {"llama", "gpt2", "hyper:rate=3", "mhc", "gated_streams", "shortcuts", "resformer"}) {
    CAPTURE(choice);
    // mHC sums the squares of streams by other additions where it has not written them itself.
    const bool exact = choice != "mhc";
    const Config config = tiny_with(choice, 4);
    TinyModel plain(config), model(with_engram(config, "[0,2]"));
    ParameterTable fresh;
    declare_model(fresh, model.config);
    start_engram_as_plain(fresh);
    model.take(plain);
    for (const int layer : {0, 2}) {
      const std::string name = layer_name(layer, "engram.wkv.weight");
      const Init start = fresh.at(name).init;
      model.fill(name, [&](int64_t i) { return start.at(1, stream_of(name), i); });
    }
    const double loss = model.step(), want = plain.step();
    if (exact) CHECK(loss == want);
    else CHECK(std::abs(loss - want) < 1e-6);
    for (const Parameter& row : plain.params.rows())
      if (exact)
        CHECK_MESSAGE(plain.values<float>(row.grad) == model.values<float>(model.params.at(row.name).grad), row.name);
    const auto grad = model.values<float>(model.params.at("model.layers.2.engram.wkv.weight").grad);
    CHECK(std::count_if(grad.end() - 8 * 8, grad.end(), [](float g) { return g != 0; }) > 32);
  }
}

TEST_CASE("engram: what is generated equals the whole forward, with boundaries in it") {
  for (const Config& config : {with_engram(tiny_config("llama"), "[0,3]"), with_engram(tiny_gpt2(), "[1]"),
                               with_engram(tiny_config("mhc"), "[1]"), looped_with_engram(tiny_config("llama"))}) {
    TinyModel model(config);
    model.use({1, 4, 4, 0, 2, 3, 4, 6, 1, 5}, {4, 4, 0, 2, 3, 4, 6, 1, 5, 0});
    model.loss();
    const auto losses = model.values<float>(model.graph.losses->tensor);
    Decoder decoder(*model.device, model.params, config, 2, 5);
    for (size_t t = 0; t < 5; ++t) {
      const auto& logits = decoder.feed({model.tokens[t], model.tokens[5 + t]});
      for (const size_t b : {0, 1}) {
        double sum = 0;
        for (size_t v = 0; v < 7; ++v) sum += std::exp(static_cast<double>(logits[7 * b + v]));
        const auto own = static_cast<double>(logits[7 * b + static_cast<size_t>(model.targets[5 * b + t])]);
        CHECK(std::log(sum) - own == doctest::Approx(losses[5 * b + t]).epsilon(2e-5));
      }
    }
  }
}

TEST_CASE("engram: parameters and FLOPs are those of its page") {
  const auto parameters = [](const Config& config) {
    ParameterTable params;
    declare_model(params, config);
    return params.count();
  };
  const auto flops = [](const Config& config) {
    ParameterTable params;
    declare_model(params, config);
    Tape tape(Dtype::f32);
    record_model(tape, params, config, 2, 5);
    return tape.forward_flops() / 10;
  };
  Config usual;
  usual.vocab_size = 100, usual.hidden_size = 768, usual.intermediate_size = 8;
  usual.num_hidden_layers = 2, usual.num_attention_heads = 2;
  usual.check(Exit::usage, "test");
  Config large = usual;
  large.engram.layers = "[1]";
  large.check(Exit::usage, "test");
  CHECK(parameters(large) - parameters(usual) == 48 * 1049422 + 2 * 768 * 768 + 2 * 768);
  for (const auto& [choice, E] : std::map<std::string, int64_t>{{"llama", 1}, {"hyper:rate=3", 3}, {"mhc", 4}}) {
    CAPTURE(choice);
    const Config plain = tiny_with(choice);
    Config config = with_engram(plain);
    config.engram.width = 24;
    const int64_t M = 24, C = 8, rows = 5 + 7 + 11 + 13;
    CHECK(parameters(config) - parameters(plain) == rows * M / 4 + (E + 1) * C * M + 2 * E * C);
    CHECK(flops(config) - flops(plain) == static_cast<double>(2 * M * (E + 1) * C + 8 * E * C));
  }
}

TEST_CASE("engram: options that do not fit are refused, each in a line") {
  const auto refused = [](const std::string& what, const EngramOptions& engram) {
    Config config = tiny_config("llama");
    config.engram = engram;
    check_fails(Exit::usage, {"flags", what}, [&] { config.check(Exit::usage, "flags"); });
  };
  refused("engram_layers", {.heads = 2});
  for (const char* layers : {"[4]", "[1,1]", "[2,1]", "[-1]", "1", "[0.5]", "x", "[true]"})
    refused("engram_layers", {.layers = layers, .heads = 2});
  refused("engram_order", {.layers = "[1]", .order = 1, .heads = 2});
  refused("engram_heads", {.layers = "[1]", .heads = 0});
  refused("engram_width 8, the model's, must be a multiple of", {.layers = "[1]", .heads = 3});
  refused("engram_width 9", {.layers = "[1]", .heads = 2, .width = 9});
  refused("engram_rows", {.layers = "[1]", .heads = 2, .rows = 1});
  refused("engram_rows", {.layers = "[1]", .heads = 8, .width = 16, .rows = 1 << 27});
  refused("engram_pad_id", {.layers = "[1]", .heads = 2, .pad_id = 7});
  refused("engram_seed", {.layers = "[1]", .heads = 2, .seed = -1});
  for (const char* boundary : {"[7]", "[-1]", "3", "[1.5]"})
    refused("engram_boundary", {.layers = "[1]", .heads = 2, .boundary = boundary});
  for (const char* map : {"[0,1,2,3,4,5]", "[0,1,2,3,4,5,7]", "[]"})
    refused("engram_map", {.layers = "[1]", .heads = 2, .map = map});
  for (const char* lists :
       {"[[1,2,3]]", "[[1,3]]", "[[1,3,5],[1,3,5]]", "[[1,3,-5]]", "[1,3,5]", "[[1,3,1537228672809129303]]"})
    refused("engram_multipliers", {.layers = "[1]", .heads = 2, .multipliers = lists});
  CHECK_NOTHROW(hashing({.heads = 2, .multipliers = "[[1,3,1537228672809129301]]"}));  // a sixth of 2^63

  for (const std::string arch : {"attnres", "denseformer", "mudd", "vertical"}) {
    CAPTURE(arch);
    check_fails(Exit::usage, {arch, "no stream", "no engram_layers"}, [&] { with_engram(tiny_with(arch)); });
  }
}

TEST_CASE("engram: a map comes from a file, and goes with the configuration") {
  const TempDir dir;
  const std::string file = dir.file("engram_map.json");
  const auto taken = [&](const std::string& text) {
    write_text(file, text);
    return hashing({.heads = 2, .map = file});
  };
  const Config config = taken(R"({"map": [0, 1, 2, 0, 3, 1, 4], "size": 5})");
  CHECK(config.engram.map == "[0,1,2,0,3,1,4]");
  CHECK(to_json(config)["crossply"]["engram_map"] == known_json(config.engram.map));
  CHECK(parse_config(to_json(config), "c").engram == config.engram);
  for (const char* text : {R"({"map": [0, 1, 2, 0, 3, 1, 4], "size": 4})", R"({"size": 5})",
                           R"({"map": [], "size": 0})", R"({"map": [0, -1], "size": 1})"})
    check_fails(Exit::bad_data, {file}, [&] { taken(text); });
  check_fails(Exit::no_input, {"none.json"}, [&] { hashing({.heads = 2, .map = dir.file("none.json")}); });
  nlohmann::json saved = to_json(config);
  saved["crossply"]["engram_map"] = file;  // a model directory names no other file
  check_fails(Exit::bad_data, {"engram_map"}, [&] { parse_config(saved, "c"); });
  Config other = config;  // all seven tokens, and three sizes
  other.engram.map = "[1,0,1,2,0,4,3]", other.hidden_size = 12, other.head_dim = 3, other.intermediate_size = 9;
  check_fails(Exit::usage, {"--resume: run is of another model", "head_dim is 2, not 3; and 2 more; give the flags"},
              [&] { refuse_other_config(config, other, "run", "--resume"); });
}

TEST_CASE("engram: a run with it goes on bit for bit, and a model without gets one that writes nothing") {
  const TempDir scratch;
  const std::string run = scratch.file("run"), plain = scratch.file("plain"), grown = scratch.file("grown");
  const std::vector<std::string> engram =
      split_words("--engram-layers [0,1] --engram-heads 2 --engram-rows 40 --engram-boundary [2]");
  const auto weights = [](const std::string& dir) { return read_text(dir + "/model.safetensors"); };
  check_outcome(train(scratch, tiny_run(run, joined(engram, split_words("--steps 8 --save-every 4 --keep 9")))),
                Exit::done, "step 8/8");
  const std::string last = weights(run + "/step_00000008");
  std::filesystem::remove_all(run + "/step_00000008");
  check_outcome(train(scratch, {"--resume", "--out", run}), Exit::done, "resumed after step 4");
  CHECK(weights(run + "/step_00000008") == last);
  check_outcome(train(scratch, {"--resume", "--out", run, "--engram-seed", "3"}), Exit::usage, "engram_seed");

  check_outcome(train(scratch, tiny_run(plain, {"--steps", "0"})), Exit::done, "initialised");
  const std::vector<std::string> from = split_words("--data arith:3 --train-samples 40 --test-samples 8 --steps 0");
  check_outcome(train(scratch, joined(from, engram, std::vector<std::string>{"--init", plain, "--out", grown})),
                Exit::done, "Engram is added");
  check_outcome(train(scratch, joined(from, engram, std::vector<std::string>{"--init", grown, "--out", run + "2"})),
                Exit::usage, "leave out --engram-");
  const auto loss = [&](const std::string& dir) {
    const Outcome done =
        run_program_inside(scratch, {"gradients", "--model", dir, "--tokens", scratch.file("tokens"), "--batch", "1",
                                     "--seq", "6", "--out", scratch.file("gradients")});
    check_outcome(done, Exit::done, "loss ");
    return done.output.substr(done.output.find("loss "));
  };
  write_text(scratch.file("tokens"), "1 2 3 4 5 6 7\n");
  CHECK(loss(grown) == loss(plain));
}
