// analyze --what maps and --what sinks: attention that is known.
#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "eval/inside/token_map.h"
#include "models/json_file.h"
#include "models/model_dir.h"
#include "tests/program.h"
#include "tests/tiny.h"
#include "tests/tiny_bpe.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// A model of `vocab` tokens on LLaMA; even: its queries are 0, so that attention is the same for all tokens.
void make_model(const std::string& dir, int64_t vocab, bool even) {
  Config config = tiny_config("llama", 2);
  config.vocab_size = vocab, config.max_position_embeddings = 64;
  config.check(Exit::usage, "test");
  TinyModel model(config);
  for (const Parameter& row : model.params.rows())
    if (even && has(row.name, "q_proj")) model.fill(row.name, [](int64_t) { return 0; });
  std::filesystem::create_directories(dir);
  save_config(dir + "/config.json", config);
  save_tensors(dir + "/model.safetensors", model.params, values_of(model.params, config));
}

}  // namespace

TEST_CASE("analyze: attention that is even has the sinks, distances and entropies of even attention") {
  const TempDir scratch;
  make_model(scratch.file("even"), 256, true);
  make_model(scratch.file("other"), 256, false);
  write_text(scratch.file("text"), std::string(300, 'x') + "the end");
  const std::string out = scratch.file("out");
  const Outcome got = run_program_inside(
      scratch, {"analyze", "--model", scratch.file("even"), scratch.file("other"), "--data",
                "text:" + scratch.file("text"), "--what", "sinks", "--sequences", "3", "--length", "4", "--out", out});
  check_outcome(got, Exit::done, "3 windows of 4 tokens, seed 42");
  check_outcome(got, Exit::done, "heads that put more than 0.3 on the first token: 16 of 16, 100.0%");
  const nlohmann::json json = read_json(out + "/sinks.json");
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
  const std::string csv = read_text(out + "/sinks.csv");
  CHECK(std::ranges::count(csv, '\n') == 1 + 2 * 4 * 4);
  check_outcome(run_program_inside(scratch, {"analyze", "--model", scratch.file("even"), "--data",
                                             "text:" + scratch.file("text"), "--what", "sinks", "--length", "1"}),
                Exit::usage, "needs windows of two tokens or more");
}

TEST_CASE("analyze: maps of a text: the tokenizer's tokens, safe to look at, and rows of shares") {
  const TempDir scratch;
  make_model(scratch.file("model"), 300, true);
  write_tiny_bpe(scratch.file("model"));
  write_text(scratch.file("text"), std::string(300, 'x') + "the end");
  const std::string out = scratch.file("out"), data = "text:" + scratch.file("text");
  const auto maps = [&](std::vector<std::string> words) {
    words.insert(words.begin(),
                 {"analyze", "--model", scratch.file("model"), "--data", data, "--what", "maps", "--out", out});
    return run_program_inside(scratch, words);
  };
  const std::string text = "the <b>\x1b[1m\n";
  const Outcome got = maps({"--text", text, "--heads", "3.1", "0.0"});
  check_outcome(got, Exit::done, "the last of 10 tokens, 9 \\n");
  check_outcome(got, Exit::done, "looks most at");
  CHECK(!has(got.output, "\x1b"));
  const nlohmann::json json = read_json(out + "/maps.json"), model = json["models"][0];
  CHECK(json["given_text"] == text);
  CHECK(model["tokens"][0] == nlohmann::json{{"id", 258}, {"text", "the"}});
  CHECK(model["layers"].size() == 4);
  for (const nlohmann::json& layer : model["layers"]) {
    CHECK(layer["heads"].size() == 4);
    CHECK(layer["mean"][9].size() == 10);
    for (const nlohmann::json& share : layer["heads"][2][3]) CHECK(share == doctest::Approx(0.25));
  }
  const std::string svg = read_text(out + "/maps.svg");
  for (const char* part :
       {"layer 0, mean of 4 heads", "layer 3, head 1", "layer 0, head 0", ">the<", "&lt;", "\\x1b", "\\n"})
    CHECK_MESSAGE(has(svg, part), part);
  CHECK(!has(svg, "\x1b"));
  const std::string csv = read_text(out + "/maps.csv");
  CHECK(std::ranges::count(csv, '\n') == 1 + 4 * (4 + 1) * 55);
  CHECK(has(csv, ",3,mean,9,9,"));
  // Of the data: the first tokens of the first window. Without a tokenizer of the model's: that of the data.
  const Outcome first = maps({"--length", "40", "--sequences", "5"});
  check_outcome(first, Exit::done, "the last of 32 tokens, 31 ");
  CHECK(has(first.output, ": 1 window of 32 tokens, "));
  CHECK(read_json(out + "/maps.json")["given_text"].is_null());
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
