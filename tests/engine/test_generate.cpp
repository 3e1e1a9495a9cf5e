// The program generate, on a model that has learned nothing.
#include <filesystem>
#include <set>
#include <sstream>

#include "engine/io/json.h"
#include "tests/support/program.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using nlohmann::json;

struct Model {
  TempDir scratch;
  std::string dir = scratch.file("model");

  Model() {
    write_text(scratch.file("text"), std::string(600, 'x'));
    check_outcome(train(scratch,
                        {"--data", "text:" + scratch.file("text"), "--seq", "48", "--width", "16", "--layers", "2",
                         "--heads", "2", "--steps", "0", "--out", dir},
                        "gpt2"),
                  Exit::done, "");
  }
  Outcome run(std::vector<std::string> words) {
    words.insert(words.begin(), {"generate", "--model", dir});
    return run_program_inside(scratch, words);
  }
  std::string prompts(const std::string& text) {
    write_text(scratch.file("prompts"), text);
    return scratch.file("prompts");
  }
  // The JSON lines that it prints.
  std::vector<json> lines(const std::vector<std::string>& words) {
    const Outcome got = run(words);
    CHECK_MESSAGE(got.code == 0, got.output);
    std::vector<json> list;
    std::istringstream all(got.output);
    for (std::string line; std::getline(all, line);)
      if (line.starts_with("{")) list.push_back(known_json(line));
    return list;
  }
};

}  // namespace

TEST_CASE("generate: a prompt's lines do not depend on the batch, on the form of the file, or on other prompts") {
  Model model;
  const std::string plain = model.prompts("one prompt of some length\nab\n\"three\" \\ here\n");
  const std::vector<std::string> sampled{"--max-new", "9", "--temperature", "1", "--seed", "3"};
  const auto with = [&](std::vector<std::string> words) {
    words.insert(words.end(), sampled.begin(), sampled.end());
    return model.lines(words);
  };
  const auto three = with({"--prompts", plain});
  REQUIRE(three.size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    CHECK(three[i]["index"] == i);
    CHECK(three[i]["tokens"].size() == 9);
    CHECK(three[i]["ended"] == "max_new");
  }
  CHECK(three[2]["prompt"] == "\"three\" \\ here");
  CHECK(with({"--prompts", plain, "--batch", "1"}) == three);
  CHECK(with({"--prompts", plain, "--batch", "2"}) == three);
  const auto twice = with({"--prompts", plain, "--batch", "4", "--samples", "2"});
  REQUIRE(twice.size() == 6);
  CHECK(twice[4]["tokens"] == three[2]["tokens"]);
  CHECK(twice[5]["tokens"] != three[2]["tokens"]);
  CHECK(twice[5]["sample"] == 1);
  const std::string objects = model.prompts(
      "{\"prompt\": \"one prompt of some length\"}\r\n{\"prompt\": \"ab\"}\n{\"id\": 1, \"prompt\": \"\\\"three\\\" "
      "\\\\ "
      "here\"}");
  CHECK(with({"--prompts", objects}) == three);
  CHECK(with({"--prompts", model.prompts("\ufeff" + read_text(objects))}) == three);  // a byte-order mark
}

TEST_CASE("generate: every token that the model's files call an end is one") {
  Model model;
  const std::vector<std::string> words{"--prompts", model.prompts("abc\n"), "--max-new", "20", "--temperature", "1"};
  const std::vector<int> all = model.lines(words)[0]["tokens"];
  const auto first = [&](int token) { return std::find(all.begin(), all.end(), token) + 1; };
  const auto ends_after = [&](int token) {
    const json line = model.lines(words)[0];
    CHECK(line["ended"] == "eos");
    CHECK(line["tokens"].get<std::vector<int>>() == std::vector<int>(all.begin(), first(token)));
  };
  json config = known_json(read_text(model.dir + "/config.json"));
  config["eos_token_id"] = all[9];
  write_text(model.dir + "/config.json", json_text(config));
  std::filesystem::remove(model.dir + "/manifest.json");  // it was changed on purpose
  ends_after(all[9]);
  write_text(model.dir + "/generation_config.json", json_text(json{{"eos_token_id", {9999, all[3]}}}));
  ends_after(first(all[3]) < first(all[9]) ? all[3] : all[9]);
}

TEST_CASE("generate: a stop string ends a row before itself") {
  Model model;
  const std::vector<std::string> words{"--prompts", model.prompts("abc\n"), "--max-new", "40", "--temperature", "1"};
  const std::vector<int> all = model.lines(words)[0]["tokens"];
  const auto letter = std::find_if(all.begin() + 1, all.end(), [](int byte) { return byte > 32 && byte < 127; });
  REQUIRE(letter != all.end());
  const auto first = std::find(all.begin(), all.end(), *letter);
  std::vector<std::string> stopped = words;
  stopped.insert(stopped.end(), {"--stop", "nothing like it", "--stop", std::string(1, static_cast<char>(*letter))});
  const json line = model.lines(stopped)[0];
  CHECK(line["ended"] == "stop");
  CHECK(line["tokens"].get<std::vector<int>>() == std::vector<int>(all.begin(), first + 1));
  CHECK(line["text"].get<std::string>().find(static_cast<char>(*letter)) == std::string::npos);
}

TEST_CASE("generate: the length of a prompt, and what comes after the model's longest sequence") {
  Model model;
  const std::string long_prompt(60, 'y');
  check_outcome(model.run({"--prompt", long_prompt}), Exit::usage, "longest sequence is 48; --keep-last");
  const Outcome cut = model.run({"--prompt", long_prompt, "--keep-last", "40", "--max-new", "20"});
  check_outcome(cut, Exit::done, "of the prompt the model sees the last 40 tokens only");
  check_outcome(cut, Exit::done, "note: ended at the model's longest sequence, 48 tokens");
  check_outcome(cut, Exit::done, "prompt: 40 tokens, ");
  check_outcome(cut, Exit::done, "; written: 8 tokens, ");
  check_outcome(model.run({"--prompt", "xy", "--max-new", "500"}), Exit::done, "; written: 46 tokens, ");
  check_outcome(model.run({"--prompt", std::string(47, 'y'), "--max-new", "500"}), Exit::done, "; written: 1 tokens");
  check_outcome(model.run({"--prompt", std::string(48, 'y')}), Exit::usage, "longest sequence is 48");
  check_outcome(model.run({"--prompt", long_prompt, "--keep-last", "48"}), Exit::usage, "longest sequence is 48");
  CHECK(cut.output.find("trained on") == std::string::npos);  // nothing says on what
  write_text(model.dir + "/train_state.json", "{\"trajectory\": {\"seq\": 30}}");
  check_outcome(model.run({"--prompt", "a prompt", "--max-new", "30"}), Exit::done,
                "note: the model was trained on sequences of 30 tokens");
  CHECK(model.run({"--prompt", "a prompt", "--max-new", "22"}).output.find("trained on") == std::string::npos);
  const std::string file = model.prompts("a\n" + long_prompt + "\n");
  check_outcome(model.run({"--prompts", file}), Exit::bad_data, "line 2 has 60 tokens");
  CHECK(model.lines({"--prompts", file, "--keep-last", "40", "--max-new", "20"})[1]["ended"] == "longest");
}

TEST_CASE("generate: bf16, and the repetition penalty without a temperature") {
  Model model;
  check_outcome(model.run({"--prompt", "a prompt", "--dtype", "bf16", "--max-new", "5"}), Exit::done,
                "written: 5 tokens");
  const std::vector<int> tokens = model.lines(
      {"--prompts", model.prompts("a prompt"), "--max-new", "30", "--repetition-penalty", "1000"})[0]["tokens"];
  CHECK(std::set<int>(tokens.begin(), tokens.end()).size() > 15);  // greedy rows of such a model soon repeat themselves
}

TEST_CASE("generate: files of prompts that are none") {
  Model model;
  const auto refused = [&](const std::string& text, const std::string& says) {
    check_outcome(model.run({"--prompts", model.prompts(text)}), Exit::bad_data, says);
  };
  check_outcome(model.run({"--prompts", model.scratch.file("nowhere")}), Exit::no_input, "nowhere");
  refused("", "has no prompts");
  refused(" \n\n", "has no prompts");
  refused("a\n\nb\n", "line 2 is empty");
  refused("{\"prompt\": \"a\"}\n{\"prompt\": 3}\n", "line 2 is no JSON object with a \"prompt\"");
  refused("{\"prompt\": \"a\"}\nb\n", "line 2: is not a JSON object");
  refused("{\"prompt\": \"a\"\n", "line 1: is not a JSON object");
  refused("{\"prompt\": \"\"}\n", "line 1 is empty");
  const std::string file = model.prompts("a\n");
  check_outcome(model.run({"--prompts", file, "--prompt", "a"}), Exit::usage, "either --prompt TEXT or --prompts FILE");
  check_outcome(model.run({}), Exit::usage, "either --prompt TEXT or --prompts FILE");
  check_outcome(model.run({"--prompts", file, "--stop", ""}), Exit::usage, "--stop is empty");
  check_outcome(model.run({"--prompts", file, "--top-p", "1.1"}), Exit::usage, "--top-p");
}
