// The program analyze, and the probabilities that it measures.
#include "eval/inside/windows.h"

#include <nlohmann/json.hpp>
#include <set>

#include "eval/inside/heat_map.h"
#include "eval/inside/probe.h"
#include "models/disk/config_json.h"
#include "tests/support/cases.h"
#include "tests/support/inside.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// The same architecture and options on a GPT-2 whose logits are divided by the layer's number.
Case on_gpt2(const Case& c) {
  Case other{c.name + " on gpt2", c.config};
  Config& config = other.config;
  if (config.arch == "llama") config.arch = "gpt2";
  config.backbone = "gpt2";
  config.num_key_value_heads = config.num_attention_heads, config.head_dim = 0;
  config.qk_norm = false;
  config.sliding_window = 0, config.window_pattern = Config().window_pattern;
  config.scale_attn_by_inverse_layer_idx = true;
  config.check(Exit::usage, "test");
  return other;
}

// out - P v of every attention op, at most, after one forward of the model.
template <class Real>
double largest_difference(TinyModel& model, int64_t* ops) {
  double largest = 0;
  const int64_t B = TinyModel::B, T = TinyModel::T;
  model.tape.watch([&](size_t n, bool) {
    const auto* node = dynamic_cast<const ops::AttentionNode*>(model.tape.nodes()[n].get());
    if (node == nullptr) return;
    ++*ops;
    if (node->in.size() > 3) return;  // slots of moda's have a share: test_routing_depth.cpp
    const AttentionInputs inputs(*node, *model.device, sizes_of(*node));
    const int64_t H = node->in[0]->shape[2], D = node->in[0]->shape[3], K = node->in[2]->shape[2];
    const std::vector<Real> v = model.values<Real>(node->in[2]->tensor), out = model.values<Real>(node->out[0]->tensor);
    std::vector<double> P(static_cast<size_t>(T * T));
    for (int64_t b = 0; b < B; ++b)
      for (int64_t h = 0; h < H; ++h) {
        inputs.probabilities(b, h, T, P.data());
        for (int64_t t = 0; t < T; ++t)
          for (int64_t d = 0; d < D; ++d) {
            double sum = 0;
            for (int64_t j = 0; j < T; ++j)
              sum += P[static_cast<size_t>(t * T + j)] *
                     static_cast<double>(v[static_cast<size_t>(((b * T + j) * K + h / (H / K)) * D + d)]);
            const auto at = static_cast<size_t>(((b * T + t) * H + h) * D + d);
            largest = std::max(largest, std::abs(sum - static_cast<double>(out[at])));
          }
      }
  });
  model.tape.forward(Step{});
  return largest;
}

// A GPT-2 of bytes, of three layers and four heads. sink: of every layer the keys at position 0 point where the queries
// of all positions do, and those of all others the opposite way; nothing but positions is in the stream.
void make_gpt2(const std::string& dir, bool sink) {
  Config config;
  config.arch = "gpt2";
  config.vocab_size = 256, config.hidden_size = 16, config.num_hidden_layers = 3, config.num_attention_heads = 4;
  config.max_position_embeddings = 128;
  config.initializer_range = 0.5;
  config.check(Exit::usage, "test");
  Weights weights(config, 3);
  const auto fill = [&](const std::string& part, const std::function<double(int64_t, int64_t)>& value) {
    for (Parameter& row : weights.params.rows()) {
      if (!has(row.name, part)) continue;
      const int64_t columns = row.shape[row.shape.rank - 1];
      std::vector<double> numbers;
      for (int64_t i = 0; i < row.shape.numel(); ++i) numbers.push_back(value(i / columns, i % columns));
      weights.params.write(row, numbers.data());
    }
  };
  if (sink) {
    for (const char* part : {"embed_tokens", "q_proj.weight", "o_proj", "down_proj"}) weights.fill(part, 0);
    const auto sign = [](int64_t c) { return c % 2 == 0 ? 1.0 : -1.0; };
    fill("embed_positions", [&](int64_t t, int64_t c) { return (t == 0 ? 1 : -1) * sign(c); });
    fill("k_proj.weight", [&](int64_t, int64_t c) { return 0.25 * sign(c); });  // k: 4 at position 0, else -4
    weights.fill("q_proj.bias", 0.5);                                           // logits 4 and -4
  }
  weights.save(dir);
}

}  // namespace

TEST_CASE("analyze: the probabilities times the values are what attention computes, in every architecture") {
  for (const Case& given : cases()) {
    std::vector<Case> both = {given};
    if (!given.config.gpt2() || given.config.arch == "gpt2") both.push_back(on_gpt2(given));
    for (const Case& c : both) {
      CAPTURE(c.name);
      int64_t ops = 0;
      TinyModel exact(c.config, "reference", PlanMode::distinct, Dtype::f64);
      CHECK(largest_difference<double>(exact, &ops) < 1e-13);
      TinyModel fast(c.config);  // its memory is shared
      CHECK(largest_difference<float>(fast, &ops) < 2e-6);
      CHECK(ops >= 2 * applications_of(c.config).count());  // once in each layer of both models, or more
    }
  }
}

TEST_CASE("analyze: the probe sees every op of a model once, in order, whatever it computes with") {
  TinyModel model(tiny_with("sla:distance=1:heads=1", 2, false));
  Probe probe(*model.device, model.params, model.config, 1, TinyModel::T, "tiny");
  REQUIRE(probe.attentions().size() == 4);
  for (int l = 0; l < 4; ++l) CHECK(probe.attentions()[static_cast<size_t>(l)].layer == l);
  std::vector<size_t> seen;
  std::vector<double> P(TinyModel::T * TinyModel::T), cut(9);
  probe.watch_attention([&](size_t i, const AttentionInputs& inputs) {
    seen.push_back(i);
    inputs.probabilities(0, 3, TinyModel::T, P.data());
    for (int64_t t = 0; t < TinyModel::T; ++t) {
      double sum = 0;
      for (int64_t j = 0; j < TinyModel::T; ++j) sum += P[static_cast<size_t>(t * TinyModel::T + j)];
      CHECK(sum == doctest::Approx(1).epsilon(1e-14));
    }
    inputs.probabilities(0, 3, 3, cut.data());  // of a shorter sequence: the same
    for (int64_t t = 0; t < 3; ++t)
      for (int64_t j = 0; j < 3; ++j)
        CHECK(cut[static_cast<size_t>(t * 3 + j)] == P[static_cast<size_t>(t * TinyModel::T + j)]);
  });
  for (int64_t b = 0; b < TinyModel::B; ++b) probe.run(model.tokens.data() + b * TinyModel::T);
  CHECK(seen == std::vector<size_t>{0, 1, 2, 3, 0, 1, 2, 3});
}

TEST_CASE("analyze: what is kept is what the model made, and putting back what was there changes nothing") {
  for (const Case& c : cases()) {
    CAPTURE(c.name);
    TinyModel model(c.config);
    Probe plain(*model.device, model.params, model.config, 1, TinyModel::T, "tiny");
    Probe touched(*model.device, model.params, model.config, 1, TinyModel::T, "tiny");
    const int L = static_cast<int>(applications_of(c.config).count());
    for (int i = 0; i <= L; ++i) CHECK(plain.shape(str("hidden.", i)) == Shape{1, TinyModel::T, c.config.hidden_size});
    for (const std::string& name : touched.names()) {
      plain.keep(name), touched.keep(name);
      touched.change(name, [](std::vector<double>&) {});
    }
    plain.run(model.tokens.data(), model.targets.data());
    touched.run(model.tokens.data(), model.targets.data());
    CHECK(plain.losses() == touched.losses());
    for (const std::string& name : plain.names()) {
      CAPTURE(name);
      CHECK(plain.at(name) == touched.at(name));
    }
    // Whatever is changed before the loss changes the loss: the names are of what the model computes with.
    for (const std::string& name : plain.names()) {
      CAPTURE(name);
      touched.change(name, [](std::vector<double>& numbers) {
        for (size_t i = 0; i < numbers.size(); ++i) numbers[i] *= i % 2 == 0 ? 1.5 : 1.25;  // a norm sees no factor
      });
      touched.run(model.tokens.data(), model.targets.data());
      if (!has(name, "hidden.") && !has(name, "own_") && !has(name, "gate") && !has(name, "exit_"))
        CHECK(plain.losses() != touched.losses());
      touched.change(name, [](std::vector<double>&) {});
    }
  }
}

// Of the tests' own architecture every layer but the first has two ops, the second one to the layer below's keys.
TEST_CASE("analyze: the heads of several attentions of a layer stand beside each other") {
  const TempDir scratch;
  TinyModel model(tiny_config("draft_two_attentions", 2));
  save_model(scratch.file("model"), model.params, model.config);
  const std::string shard = scratch.file("x.bin");
  write_shard(shard, {1, 2, 3, 4, 5, 6, 0, 2, 5, 1, 3, 6, 2}, ShardFormat::uint16);
  const Outcome got = analyze(scratch, {"model"}, shard, "--what attention --sequences 2 --length 6");
  check_outcome(got, Exit::done, "of 28, ");
  const nlohmann::json layers = out_json(scratch, "attention")["models"][0]["layers"];
  for (size_t l = 0; l < 4; ++l) CHECK(layers[l]["heads"].size() == (l == 0 ? 4 : 8));
}

TEST_CASE("analyze: windows begin anywhere in a sequence of text, and at the start of a task's") {
  const TempDir scratch;
  std::string text;
  for (int i = 0; i < 2000; ++i) text += static_cast<char>(i % 251);
  DataOptions data;
  data.spec = text_file(scratch, text), data.seq_len = 40;
  data.whole = true;
  const Dataset dataset = open_dataset(data);
  const std::vector<TokenWindow> windows = random_windows(*dataset.test, 16, 400, 1);
  for (const TokenWindow& window : windows) {
    CHECK(window.length == 16);
    for (size_t t = 1; t < 16; ++t) CHECK(window.tokens[t] == (window.tokens[t - 1] + 1) % 251);
  }
  const auto same = [](const TokenWindow& a, const TokenWindow& b) { return a.tokens == b.tokens; };
  CHECK(std::ranges::equal(windows, random_windows(*dataset.test, 16, 400, 1), same));
  CHECK(!std::ranges::equal(windows, random_windows(*dataset.test, 16, 400, 2), same));
  std::set<int32_t> starts;
  for (const TokenWindow& window : windows) starts.insert(window.tokens[0]);
  CHECK(starts.size() > 150);  // of 251; of sequences' beginnings there are only 50
  // However the file is cut into sequences.
  data.seq_len = 64;
  CHECK(std::ranges::equal(windows, random_windows(*open_dataset(data).test, 16, 400, 1), same));
  // From any place with the same chance: 10 places of a file, each a tenth of 4000 windows to 5 deviations.
  std::string few;
  for (char c = 0; c < 14; ++c) few += c;
  write_text(scratch.file("few"), few);
  data.spec = "text:" + scratch.file("few"), data.seq_len = 9;
  std::map<int32_t, int> drawn;
  for (const TokenWindow& window : random_windows(*open_dataset(data).test, 4, 4000, 1)) ++drawn[window.tokens[0]];
  CHECK(drawn.size() == 10);
  for (const auto& [place, times] : drawn) CHECK_MESSAGE(std::abs(times - 400) < 95, place << ": " << times);
  DataOptions arith;
  arith.spec = "arith:3", arith.train_samples = arith.test_samples = 50;
  const Dataset task = open_dataset(arith);
  const int64_t T = task.test->seq_len(), first = 4;
  std::set<std::vector<int32_t>> beginnings;
  std::vector<int32_t> tokens(static_cast<size_t>(T)), targets(tokens.size());
  for (int64_t i = 0; i < task.test->size(); ++i) {
    task.test->read(i, tokens.data(), targets.data());
    beginnings.insert({tokens.begin(), tokens.begin() + first});
  }
  for (const TokenWindow& window : random_windows(*task.test, first, 50, 1)) {
    CHECK(beginnings.contains(window.tokens));
    CHECK(window.length == first);
  }
  std::set<int64_t> lengths;  // of whole ones: without the padding
  for (const TokenWindow& window : random_windows(*task.test, T, 50, 1)) lengths.insert(window.length);
  CHECK(lengths.size() > 1);
}

TEST_CASE("analyze: a model of sinks is lazy in every layer, a random one in none; what is written") {
  const TempDir scratch;
  make_gpt2(scratch.file("sink"), true);
  make_gpt2(scratch.file("random"), false);
  const auto attention = [&, data = letters_file(scratch)] {
    return analyze(scratch, {"sink", "random"}, data, "--what attention --sequences 6");
  };
  const Outcome got = attention();
  check_outcome(got, Exit::done, "lazy layers: 3 of 3\n");
  check_outcome(got, Exit::done, "lazy layers: 0 of 3\n");
  check_outcome(got, Exit::done, "6 windows of 100 tokens, seed 42");
  check_outcome(got, Exit::done, "collapsed heads, of rank below 1.5: 12 of 12, 100.0%");
  check_width(got, scratch);
  const nlohmann::json json = out_json(scratch, "attention");
  CHECK(json["sequences"] == 6);
  CHECK(json["seed"] == 42);
  CHECK(json["tau"] == 0.9);
  CHECK(json["same_windows"] == true);
  const nlohmann::json &sink = json["models"][0], &random = json["models"][1];
  CHECK(sink["collapsed_heads"] == 12);
  CHECK(sink["lazy_groups"].size() == 1);
  CHECK(sink["lazy_groups"][0]["last_layer"] == 2);
  CHECK(sink["halves"][1]["avg_rank"] == 1);
  for (const nlohmann::json& layer : sink["layers"]) {
    CHECK(layer["lazy"] == true);
    CHECK(layer["max_rank"] == 1);
    CHECK(layer["avg_mass"] == 1);
  }
  for (const nlohmann::json& layer : random["layers"]) {
    CHECK(layer["lazy"] == false);
    CHECK(layer["max_rank"] > 1.5);
    for (const nlohmann::json& head : layer["heads"]) CHECK(head["rank"] <= head["mass"]);
  }
  const std::string csv = out_text(scratch, "attention.csv");
  CHECK(csv.starts_with("model,layer,head,rank,mass\n"));
  CHECK(has(csv, "sink,2,3,1.0,1.0\n"));
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 1 + 2 * 3 * 4);
  const std::string svg = out_text(scratch, "attention.svg");
  CHECK(svg.starts_with("<svg xmlns="));
  check_has(svg, {"attention rank", "attention mass", "sink", "random", ">layer<", ">head<"});
  CHECK(!has(svg, "nan"));
  // Again: its own files are replaced, and the same seed gives the same numbers on several threads too.
  check_outcome(attention(), Exit::done, "wrote");
  CHECK(out_json(scratch, "attention") == json);
}

TEST_CASE("analyze: the average rank of given groups of layers") {
  const TempDir scratch;
  make_gpt2(scratch.file("sink"), true);
  make_gpt2(scratch.file("random"), false);
  const auto attention = [&, data = letters_file(scratch)](const std::vector<std::string>& groups) {
    return analyze(scratch, {"sink", "random"}, data, "--what attention --sequences 2 --length 20 --groups", groups);
  };
  const Outcome got = attention({"0-1,1-2", "2"});
  check_outcome(got, Exit::done, "groups:\n  layers 0 to 1: AvgRank 1.00\n  layers 1 to 2: AvgRank 1.00\n  layer 2: ");
  const nlohmann::json models = out_json(scratch, "attention")["models"];
  for (const nlohmann::json& model : models) {
    const auto rank = [&](size_t layer) { return model["layers"][layer]["max_rank"].get<double>(); };
    REQUIRE(model["groups"].size() == 3);
    CHECK(model["groups"][0]["last_layer"] == 1);
    CHECK(model["groups"][0]["avg_rank"] == doctest::Approx((rank(0) + rank(1)) / 2));
    CHECK(model["groups"][1]["avg_rank"] == doctest::Approx((rank(1) + rank(2)) / 2));
    CHECK(model["groups"][2]["avg_rank"] == rank(2));
  }
  CHECK(models[1]["groups"][2]["avg_rank"] > 1.5);
  const std::string svg = out_text(scratch, "attention.svg");
  check_has(svg, {"AvgRank of groups of layers", ">0-1</text>", ">model</text>"});
  check_outcome(attention({"0-3"}), Exit::usage, "there is no layer 3; the layers are 0 to 2");
  check_outcome(attention({"2-1"}), Exit::usage, "'2-1' ends before it begins");
  for (const char* bad : {"", "0-", "-1", "a-b", "0-1-2", "0,,1", "0,"})
    check_outcome(attention({bad}), Exit::usage, "--groups");
}

TEST_CASE("analyze: windows of two models are the same wherever they can be, and told where not") {
  const TempDir scratch;
  make_gpt2(scratch.file("model"), false);
  const std::string data = letters_file(scratch);
  for (const char* seq : {"20", "24"})
    check_outcome(train(scratch, {"--width", "8", "--ffn", "8", "--layers", "1", "--heads", "2", "--seq", seq,
                                  "--steps", "1", "--data", data, "--out", scratch.file(seq)}),
                  Exit::done, "step 1/1");
  const auto attention = [&](const std::vector<std::string>& models, const std::string& flags) {
    return analyze(scratch, models, data, "--what attention --sequences 4 " + flags);
  };
  const std::vector<std::string> runs = {"20", "24"};
  check_outcome(attention(runs, ""), Exit::done, "--split all --length 20 gives both the same");
  CHECK(out_json(scratch, "attention")["same_windows"] == false);
  const Outcome cut = attention(runs, "--length 10");
  check_outcome(cut, Exit::done, "--split all --length 10 gives both the same");
  CHECK(out_json(scratch, "attention")["same_windows"] == false);
  for (const std::string length : {"10", "20"}) {
    const Outcome got = attention({"20", "24", "model"}, "--split all --length " + length);
    check_outcome(got, Exit::done, "wrote");
    CHECK(!has(got.output, "other windows"));
    CHECK(out_json(scratch, "attention")["same_windows"] == true);
  }
}

TEST_CASE("analyze: a heat map has a cell for every number, its number where there is room, and one scale for a band") {
  const auto svg_of = [&](const std::vector<HeatMapBand>& bands) {
    return heat_map_svg("<title>", "row & row", "column", bands);
  };
  const HeatMap small{"a", {{1, 3, NAN}, {2.25, 1, 1}}}, other{"b\x01", {{1, 1, 1}, {1, 12, 1}, {1, 1, 1}}};
  const size_t frame = count_of(svg_of({{"none", {{"empty", {}}}}}), "<rect");  // background, frame, scale
  const std::string both = svg_of({{"band", {small, other}}});
  CHECK(count_of(both, "<rect") == frame + 1 + 5 + 9);  // another frame
  CHECK(has(both, ">2.2<"));
  CHECK(count_of(both, ">12<") == 2);              // in its cell and at the end of the scale
  CHECK(count_of(both, "fill=\"#08306b\"") == 1);  // the darkest
  CHECK(count_of(svg_of({{"band", {small}}, {"band", {other}}}), "fill=\"#08306b\"") == 2);
  for (const char* part : {"&lt;title&gt;", "row &amp; row", "b "}) CHECK(has(both, part));
  check_has_none(both, {"nan", "inf"});
  const std::string large = svg_of({{"band", {{"large", std::vector(128, std::vector<double>(128, 1.5))}}}});
  CHECK(count_of(large, "<rect") == frame);
  CHECK(count_of(large, "zM") == 128 * 128 - 1);  // cells of one colour are one path
  CHECK(count_of(large, ">1.5<") == 1);           // of the scale
}

TEST_CASE("analyze: bad input") {
  const TempDir scratch;
  make_gpt2(scratch.file("model"), false);
  write_text(scratch.file("short"), letters(60));
  const std::string data = letters_file(scratch), out = scratch.file("out"), model = scratch.file("model");
  const auto check = [&](const std::string& flags, Exit code, const std::string& says) {
    check_outcome(run_program_inside(scratch, split_words("analyze --sequences 2 --model " + flags)), code, says);
  };
  const auto attention_of = [](const std::string& of, const std::string& on) {
    return of + " --data " + on + " --what attention";
  };
  const std::string usual = attention_of(model, data), brief = attention_of(model, "text:" + scratch.file("short"));
  const std::string nobody = attention_of(scratch.file("none"), data);
  check(nobody, Exit::no_input, "none");
  check(model + " --data " + data + " --what heads", Exit::usage, "'heads' is not one of:");
  check(model + " --data " + data, Exit::usage, "give --what or --dump");
  check(usual + " attention", Exit::usage, "attention is there twice");
  check(usual + " --length 129", Exit::usage, "takes sequences of at most 128 tokens");
  check(brief + " --length 80", Exit::usage, "have only 59 tokens");
  check(brief, Exit::done, "note: windows of 59 tokens, not of 100: the data's sequences have no more");
  check(attention_of(model, "arith:3") + " --tau 2", Exit::usage, "--tau");
  write_shard(scratch.file("x.bin"), std::vector<uint32_t>(300, 256), ShardFormat::uint16);
  check(attention_of(model, scratch.file("x.bin")), Exit::bad_data, "vocabulary has only 256");
  // What somebody else wrote stays.
  std::filesystem::create_directories(out);
  for (const char* name : {"attention.csv", "attention.json", "attention.svg"}) {
    write_text(out + "/" + name, "{}");
    check(usual + " --out " + out, Exit::usage, "was not written by this program");
    CHECK(read_text(out + "/" + name) == "{}");
    std::filesystem::remove(out + "/" + name);
  }
  std::filesystem::create_directories(out + "/attention.svg");  // known before the model is looked at
  check(nobody + " --out " + out, Exit::usage, "attention.svg is no file");
  std::filesystem::remove(out + "/attention.svg");
  write_text(scratch.file("file"), "x");
  check(usual + " --out " + scratch.file("file"), Exit::usage, "is no directory");
  // Attention that is not finite: of queries that overflow.
  const auto check_huge = [&](const char* part, const std::string& name, const std::string& says) {
    Weights weights(load_config(model + "/config.json"));
    load_weights(model, weights.config, weights.params);
    weights.fill(part, 3e38);
    weights.save(scratch.file(name));
    check(attention_of(scratch.file(name), data) + " --out " + out, Exit::not_finite, says);
  };
  check_huge("q_proj.weight", "huge", "huge: the attention of layer 0, head");
  // Or only what it computes: finite probabilities times values that are not.
  check_huge("v_proj.weight", "values", "values: what the attention of layer 0 puts out is not finite");
  CHECK(std::filesystem::is_empty(out));
}
