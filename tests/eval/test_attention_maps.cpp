// analyze --what maps and --what sinks: attention that is known.

#include "eval/inside/token_map.h"
#include "tests/support/inside.h"
#include "tests/support/tiny_bpe.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// A model of `vocab` tokens on LLaMA; even: its queries are 0, so that attention is the same for all tokens.
void make_model(const std::string& dir, int64_t vocab, bool even, int64_t positions = 64) {
  Config config = tiny_config("llama", 2);
  config.vocab_size = vocab, config.max_position_embeddings = positions;
  config.check(Exit::usage, "test");
  TinyModel model(config);
  if (even) set(model, "q_proj", 0);
  save_model(dir, model.params, config);
}

}  // namespace

TEST_CASE("analyze: attention that is even has the sinks, distances and entropies of even attention") {
  const TempDir scratch;
  make_model(scratch.file("even"), 256, true);
  make_model(scratch.file("other"), 256, false);
  const std::string data = text_file(scratch, std::string(300, 'x') + "the end");
  const Outcome got = analyze(scratch, {"even", "other"}, data, "--what sinks --sequences 3 --length 4");
  check_outcome(got, Exit::done, "3 windows of 4 tokens, seed 42");
  check_outcome(got, Exit::done, "heads that put more than 0.3 on the first token: 16 of 16, 100.0%");
  const nlohmann::json json = out_json(scratch, "sinks");
  // Rows 1, 2 and 3, each even over itself and what is before: on 0 and on t 1/2, 1/3, 1/4; distances 1/2, 1, 3/2.
  for (const nlohmann::json& layer : json["models"][0]["layers"]) {
    CHECK(layer["heads"].size() == 4);
    CHECK(layer["first"] == doctest::Approx(13.0 / 36));
    CHECK(layer["own"] == doctest::Approx(13.0 / 36));
    CHECK(layer["distance"] == doctest::Approx(1));
    CHECK(layer["entropy"] == doctest::Approx(std::log(24.0) / 3));
    CHECK(layer["sink_heads"] == 4);
  }
  CHECK(json["same_windows"] == true);
  const std::string csv = out_text(scratch, "sinks.csv");
  CHECK(std::ranges::count(csv, '\n') == 1 + 2 * 4 * 4);
  check_outcome(analyze(scratch, {"even"}, data, "--what sinks --length 1"), Exit::usage,
                "needs windows of two tokens or more");
}

TEST_CASE("analyze: maps of a text: the tokenizer's tokens, safe to look at, and rows of shares") {
  const TempDir scratch;
  make_model(scratch.file("model"), 300, true);
  write_tiny_bpe(scratch.file("model"));
  const std::string data = text_file(scratch, std::string(300, 'x') + "the end");
  const auto maps = [&](const std::vector<std::string>& words) {
    return analyze(scratch, {"model"}, data, "--what maps", words);
  };
  const std::string text = "the <b>\x1b[1m\n";
  const Outcome got = maps({"--text", text, "--heads", "3.1", "0.0"});
  check_outcome(got, Exit::done, "the last of 10 tokens, 9 \\n");
  check_outcome(got, Exit::done, "looks most at");
  CHECK(!has(got.output, "\x1b"));
  const nlohmann::json json = out_json(scratch, "maps"), model = json["models"][0];
  CHECK(json["given_text"] == text);
  CHECK(model["bin"] == 1);
  CHECK(model["texts"][0][0] == nlohmann::json{{"id", 258}, {"text", "the"}});
  CHECK(model["layers"].size() == 4);
  for (const nlohmann::json& layer : model["layers"]) {
    CHECK(layer["heads"].size() == 4);
    CHECK(layer["mean"][9].size() == 10);
    for (const nlohmann::json& share : layer["heads"][2][3]) CHECK(share == doctest::Approx(0.25));
  }
  const std::string svg = out_text(scratch, "maps.svg");
  for (const char* part :
       {"layer 0, mean of 4 heads", "layer 3, head 1", "layer 0, head 0", ">the<", "&lt;", "\\x1b", "\\n"})
    CHECK_MESSAGE(has(svg, part), part);
  CHECK(!has(svg, "\x1b"));
  const std::string csv = out_text(scratch, "maps.csv");
  CHECK(std::ranges::count(csv, '\n') == 1 + 4 * (4 + 1) * 55);
  CHECK(has(csv, ",3,mean,9,9,"));
  // Of the data: the first window. Without a tokenizer of the model's: that of the data.
  const Outcome first = maps({"--sequences", "5"});
  check_outcome(first, Exit::done, "the last of 32 tokens, 31 ");
  CHECK(has(first.output, ": 1 window of 32 tokens, "));
  CHECK(out_json(scratch, "maps")["given_text"].is_null());
  std::filesystem::remove(scratch.file("model") + "/tokenizer.json");
  check_outcome(maps({"--text", "ab"}), Exit::done, "the last of 2 tokens, 1 b");
  // A prompt too long, empty, or with heads that are not there.
  check_outcome(maps({"--text", std::string(65, 'x')}), Exit::usage, "takes sequences of at most 64");
  check_outcome(maps({"--text", ""}), Exit::usage, "--text has no tokens");
  for (const char* head : {"3", "3.", ".1", "3.x", "3.1.2", "-1.0"})
    check_outcome(maps({"--text", "ab", "--heads", head}), Exit::usage, "--heads");
  check_outcome(maps({"--text", "ab", "--heads", "4.0"}), Exit::usage, "are 0 to 3");
  check_outcome(maps({"--text", "ab", "--heads", "3.4"}), Exit::usage, "has 4 heads, from 0");
}

TEST_CASE("analyze: maps of whole texts and of several, with the causal mask and without") {
  const TempDir scratch;
  make_model(scratch.file("even"), 256, true, 200);
  make_model(scratch.file("other"), 256, false, 200);
  const std::string data = letters_file(scratch);
  const auto maps = [&](const std::string& model, const std::vector<std::string>& words) {
    const Outcome got = analyze(scratch, {model}, data, "--what maps", words);
    check_outcome(got, Exit::done, "looks most at");
    return out_json(scratch, "maps")["models"][0];
  };
  // The mean of three texts is that of their maps; a text is the window that the same seed gives.
  const nlohmann::json mean = maps("other", {"--texts", "3", "--length", "40"});
  REQUIRE(mean["texts"].size() == 3);
  std::vector<nlohmann::json> single;
  for (const nlohmann::json& ids : mean["texts"]) {
    std::string own;
    for (const nlohmann::json& token : ids) own += static_cast<char>(token["id"].get<int>());
    REQUIRE(own.size() == 40);
    single.push_back(maps("other", {"--text", own}));
  }
  CHECK(single[0]["texts"][0] != single[1]["texts"][0]);
  double largest = 0;
  for (size_t t = 0; t < 40; ++t)
    for (size_t j = 0; j <= t; ++j) {
      const auto share = [&](const nlohmann::json& m) { return m["layers"][2]["heads"][1][t][j].get<double>(); };
      const double three = (share(single[0]) + share(single[1]) + share(single[2])) / 3;
      largest = std::max(largest, std::abs(share(mean) - three));
    }
  CHECK(largest < 1e-12);
  // Without the mask every token also looks at later ones; from the same queries and keys, the shares of those before
  // keep their ratios.
  const nlohmann::json full = maps("other", {"--texts", "3", "--length", "40", "--causal-mask", "false"});
  const nlohmann::json row = full["layers"][0]["heads"][0][5];
  REQUIRE(row.size() == 40);
  double sum = 0;
  for (const nlohmann::json& share : row) sum += share.get<double>();
  CHECK(sum == doctest::Approx(1));
  const nlohmann::json even = maps("even", {"--causal-mask", "false", "--length", "10"})["layers"][3]["heads"][2];
  for (const nlohmann::json& of_row : even)
    for (const nlohmann::json& share : of_row) CHECK(share == doctest::Approx(0.1));
  CHECK(out_json(scratch, "maps")["causal_mask"] == false);
  // All of a long text: every share in the files, and cells of several tokens in the figure.
  const nlohmann::json whole = maps("even", {"--length", "150"});
  CHECK(whole["bin"] == 1);
  CHECK(whole["layers"][0]["mean"].size() == 150);
  CHECK(whole["layers"][0]["heads"][0][149][7] == doctest::Approx(1.0 / 150));
  const std::string svg = out_text(scratch, "maps.svg");
  check_has(svg, {"even: 150 tokens, a cell is 4 x 4 tokens", ">0-3</text>", "148-149: 144-147 0.03<"});
  CHECK(svg.size() < 2000000);
  check_outcome(analyze(scratch, {"even"}, data, "--what maps --text ab --texts 2"), Exit::usage, "--text");
}

TEST_CASE("analyze: bins of tokens keep what a row sums to, whatever their steps") {
  const int64_t n = 11;
  std::vector<double> P(n * n);
  for (int64_t t = 0; t < n; ++t)
    for (int64_t j = 0; j <= t; ++j) P[static_cast<size_t>(t * n + j)] = 1.0 / static_cast<double>(t + 1);
  const TokenBins tokens{n}, pairs{n, 2}, fours{n, 4};
  CHECK(TokenBins::at_most(n, 6).bin == 2);
  CHECK(TokenBins::at_most(n, 5.9).bin == 4);
  CHECK(TokenBins::at_most(n, 11).bin == 1);
  CHECK(TokenBins::at_most(1, 0.5).count() == 1);
  CHECK(pairs.name(1) == "2-3");
  CHECK(pairs.name(5) == "10");
  std::vector<double> by_pairs(36), at_once(9), in_steps(9);
  add_binned(&by_pairs, pairs, P.data(), tokens, 1);
  add_binned(&at_once, fours, P.data(), tokens, 1);
  add_binned(&in_steps, fours, by_pairs.data(), pairs, 0.5);
  add_binned(&in_steps, fours, by_pairs.data(), pairs, 0.5);
  for (size_t i = 0; i < 9; ++i) CHECK(in_steps[i] == doctest::Approx(at_once[i]).epsilon(1e-14));
  for (size_t t = 0; t < 3; ++t)
    CHECK(at_once[3 * t] + at_once[3 * t + 1] + at_once[3 * t + 2] == doctest::Approx(1).epsilon(1e-14));
  CHECK(by_pairs[0] == doctest::Approx(1));
  CHECK(by_pairs[6] == doctest::Approx((2.0 / 3 + 2.0 / 4) / 2));
  CHECK(by_pairs[1] == 0);
}

TEST_CASE("analyze: labels of tokens are one short line") {
  CHECK(token_label(" the") == "\xC2\xB7the");
  CHECK(token_label("\n\t") == "\\n\\t");
  CHECK(token_label("\xC3") == "\\xc3");
  CHECK(token_label("twelve chars") ==
        "twelve\xC2\xB7"
        "chars");
  CHECK(token_label("thirteen char") ==
        "thirteen\xC2\xB7"
        "ch\xE2\x80\xA6");
  CHECK(token_label("").empty());
}
