// What our directories carry on from another one names no Python code of that one.
#include "data/carried_settings.h"

#include "tests/support/program.h"
#include "tests/support/tiny_bpe.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Json = nlohmann::ordered_json;

const std::string foreign = R"({
  "model_max_length": 1000000000000000019884624838656,
  "auto_map": {"AutoTokenizer": ["somebody/code--tokenization_theirs.TheirTokenizer", null]},
  "tokenizer_class": "TheirTokenizer",
  "init": [{"custom_pipelines": {"text": {"impl": "theirs.Pipeline"}}, "kept": 1}],
  "eos_token": "<|end|>"
})";

}  // namespace

TEST_CASE("carried settings: a tokenizer without the state of a call, and a class that older versions know") {
  const std::string plain = R"({"version":"1.0","truncation":null,"model":{"type":"BPE"}})";
  CHECK(carried_tokenizer(plain) == plain);
  CHECK(carried_tokenizer("no JSON") == "no JSON");
  const auto copy = known_json<nlohmann::ordered_json>(
      carried_tokenizer(R"({"truncation":{"max_length":8},"padding":{"strategy":{"Fixed":8}},"model":{"a":1}})"));
  CHECK(copy["truncation"].is_null());
  CHECK(copy["padding"].is_null());
  CHECK(copy["model"]["a"] == 1);
  const std::string newer = R"({"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"})";
  const auto settings = known_json<nlohmann::ordered_json>(carried_settings(newer, "tokenizer_config.json"));
  CHECK(settings["tokenizer_class"] == "PreTrainedTokenizerFast");
  CHECK(settings["eos_token"] == "</s>");
}

TEST_CASE("carried settings: keys that name Python code are gone at every depth, all others stay") {
  const Json got = known_json<Json>(carried_settings(foreign, "tokenizer_config.json"));
  CHECK(json_text(got) ==
        R"({"model_max_length":1e+30,"tokenizer_class":"PreTrainedTokenizerFast","init":[{"kept":1}],)"
        R"("eos_token":"<|end|>"})");
  for (const char* text : {R"({"auto_map": ["theirs.Slow", null], "tokenizer_class": "Slow"})",
                           R"({"\u0061uto_map": {"AutoTokenizer": "theirs.Slow"}, "tokenizer_class": "Slow"})"})
    CHECK(json_text(known_json<Json>(carried_settings(text, "x"))) ==
          R"({"tokenizer_class":"PreTrainedTokenizerFast"})");
  const std::string processor = R"({"auto_map":{"AutoProcessor":"theirs.P"},"tokenizer_class":"LlamaTokenizer"})";
  CHECK(json_text(known_json<Json>(carried_settings(processor, "x"))) == R"({"tokenizer_class":"LlamaTokenizer"})");
  for (const char* key : {"custom_pipelines", "custom_generate", "trust_remote_code"})
    CHECK(carried_settings(str("{\"", key, "\": \"theirs\"}"), "x") == "{}\n");
}

TEST_CASE("carried settings: what names no code is carried byte for byte, what is no object is not carried") {
  for (const std::string text :
       {"{\"a\":  1e3,\n\"tokenizer_class\": \"LlamaTokenizer\"}", "{}", "{\"a\": \"auto_map\"}"})
    CHECK(carried_settings(text, "x") == text);
  for (const char* text : {"", "[1]", "{\"auto_map\": {}, \"a\": NaN}", "{\"auto_map\": {\"AutoTokenizer\": \"x\"}"})
    CHECK(carried_settings(text, "x") == "");
}

TEST_CASE("carried settings: --init, transplant and prepare carry no code of a foreign directory") {
  const TempDir scratch;
  const std::string source = scratch.file("source");
  check_outcome(train(scratch, {"--steps", "0", "--data", "arith:3", "--train-samples", "8", "--test-samples", "4",
                                "--width", "16", "--layers", "1", "--heads", "2", "--vocab", "512", "--out", source}),
                Exit::done, "");
  std::filesystem::remove(source + "/manifest.json");
  write_tiny_bpe(source);
  auto config = known_json<Json>(read_text(source + "/config.json"));
  config["auto_map"] = {{"AutoModelForCausalLM", "somebody/code--modeling_theirs.Theirs"}};
  write_text(source + "/config.json", json_text(config));
  write_text(source + "/modeling_theirs.py", "raise SystemExit\n");
  for (const char* name : {"tokenizer_config.json", "generation_config.json", "special_tokens_map.json"})
    write_text(source + "/" + name, foreign);
  write_text(source + "/added_tokens.json", R"({"auto_map": 3})");  // a token, and no setting
  write_text(scratch.file("text.txt"), "some words of a text\n");

  const std::string data = "text:" + scratch.file("text.txt");
  const std::vector<std::vector<std::string>> commands = {
      {"train_llama", "--init", source, "--steps", "0", "--data", data, "--seq", "4", "--out", scratch.file("init")},
      {"train_relay", "--init", source, "--steps", "0", "--data", data, "--seq", "4", "--out", scratch.file("other")},
      {"transplant", "--model", source, "--blocks", "0,0", "--out", scratch.file("transplanted")},
      {"prepare", "--tokenizer", source, "--val", "0", "--eot", "a", "--out", scratch.file("prepared"),
       scratch.file("text.txt")}};
  for (const auto& words : commands) {
    CAPTURE(words[0]);
    check_outcome(run_program_inside(scratch, words), Exit::done, "tokenizer_config.json names Python code");
  }
  int files = 0;
  for (const char* dir : {"init", "other", "transplanted", "prepared"})
    for (const auto& entry : std::filesystem::directory_iterator(scratch.file(dir))) {
      const std::string name = entry.path().filename(), text = read_text(entry.path());
      CAPTURE(entry.path().string());
      CHECK(name != "modeling_theirs.py");
      CHECK(!has(text, "theirs"));
      CHECK((!has(text, "auto_map") || name == "added_tokens.json" || dir == std::string("other")));
      ++files;
    }
  CHECK(files > 20);
  CHECK(has(read_text(scratch.file("init/tokenizer_config.json")), "model_max_length"));
  CHECK(known_json<Json>(read_text(scratch.file("other/config.json")))["auto_map"]["AutoConfig"] ==
        "modeling_crossply_relay.CrossplyRelayConfig");
  CHECK(read_text(scratch.file("init/added_tokens.json")) == R"({"auto_map": 3})");
}
