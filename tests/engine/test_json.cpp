#include "engine/io/json.h"

#include "data/tokenizer.h"
#include "engine/io/json_file.h"
#include "engine/io/safetensors.h"
#include "models/config.h"
#include "models/disk/checkpoint.h"
#include "models/disk/config_json.h"
#include "models/disk/model_dir.h"
#include "tests/support/data_check.h"
#include "tests/support/tiny.h"
#include "train/run/metrics.h"

using namespace crossply;
using namespace crossply::test;

namespace {

std::string nested(int depth) {
  const size_t n = static_cast<size_t>(depth);
  return std::string(n, '[') + std::string(n, ']');
}

// A JSON object with something nested too deep for a stack under a key that its reader may or may not know.
std::string deep_object(const std::string& key) { return "{\"" + key + "\": " + nested(80000) + "}"; }

}  // namespace

TEST_CASE("json: nesting is limited, and brackets in strings are none") {
  CHECK(parse_json(nested(max_json_depth), "here").is_array());
  check_fails(Exit::bad_data, {"here", "deep"}, [] { parse_json(nested(max_json_depth + 1), "here"); });
  check_fails(Exit::bad_data, {"deep"}, [] { parse_json(nested(80000), "here"); });
  check_fails(Exit::bad_data, {"deep"}, [] { parse_json(std::string(80000, '['), "here"); });
  CHECK(try_parse_json(nested(80000)).is_discarded());
  const std::string brackets(1000, '[');
  CHECK(parse_json("[\"" + brackets + "\"]", "here")[0] == brackets);
  CHECK(parse_json("[\"\\\"" + brackets + "\\\\\",[]]", "here")[0] == "\"" + brackets + "\\");
  std::string many = "[[]";  // wide is not deep
  for (int i = 0; i < 1000; ++i) many += ",[{}]";
  CHECK(parse_json(many + "]", "here").size() == 1001);
}

TEST_CASE("json: what is no JSON is bad data, with the place") {
  for (const char* text : {"", "{", "{\"a\":1}}", "nan", "[\"\xff\"]", "\xff", "[1,]"})
    check_fails(Exit::bad_data, {"here", "at byte"}, [&] { parse_json(text, "here"); });
  for (const std::string number : {"1e999", "-1e-400", "0.1e-400"})  // the parser would take the small ones for 0
    check_fails(Exit::bad_data, {"here", "too large or too small"}, [&] { parse_json("[" + number + "]", "here"); });
  CHECK(parse_json("[-0.0e-999, 1e-310, 18446744073709551616, \"1e-400\"]", "here")[1] == 1e-310);
  check_fails(Exit::bad_data, {"here", "zero byte", " 2"}, [] { parse_json(std::string("{}\0x", 4), "here"); });
  CHECK(try_parse_json(std::string("{}\0", 3)).is_discarded());
  CHECK(try_parse_json("{").is_discarded());
}

TEST_CASE("json: what is wrong is said in words, with its byte from 0") {
  const auto says = [](const std::string& text, const std::string& what) {
    check_fails(Exit::bad_data, {"here", what}, [&] { parse_json(text, "here"); });
  };
  says("{\"text\":\"one\",\"score\":NaN}", "NaN at byte 22: JSON has no such number");
  says("[-Infinity]", "-Infinity at byte 1: JSON has no such number");
  says("[nan]", "nan at byte 1");
  says("[True]", "True at byte 1: JSON writes true, false and null");
  says("{'a': 1}", "a single quote at byte 1");
  says("[\"a\\ud800\"]", "a lone surrogate, \\ud800, at byte 3");
  says("[\"a\\ud800\\u0841\"]", "a lone surrogate, \\ud800, at byte 3");
  says("[\"\\udc00\"]", "a lone surrogate, \\udc00, at byte 2");
  says("[\"abc\xff\"]", "\\xff at byte 5 is not UTF-8");
  says("[\"\x01\"]", "a control character in a string, \\x01, at byte 2");
  says("[1", "it ends too early, at byte 2");
  says("[\"ab", "it ends too early, at byte 4, inside a string");
  says("[] []", "more text behind the value, wrong at byte 3");
  says("[1,]", "wrong at byte 3");
  says("\xef\xbb\xbf[x]", "wrong at byte 4");  // a byte order mark counts
}

TEST_CASE("json: a name that is not UTF-8 is escaped, any other stays") {
  CHECK(utf8_or_escaped("plain \\ name") == "plain \\ name");
  CHECK(utf8_or_escaped("donn\xc3\xa9s") == "donn\xc3\xa9s");
  CHECK(utf8_or_escaped("donn\xe9s") == "donn\\xe9s");
  CHECK(utf8_or_escaped("\x1b") == "\x1b");  // JSON escapes it, and who reads it gets the name back
}

TEST_CASE("json: every reader refuses a document that is nested too deep") {
  const TempDir dir;
  const std::string path = dir.file("x.json");
  for (const char* key : {"rope_scaling", "crossply", "hidden_act", "unknown"}) {
    write_text(path, deep_object(key));
    check_fails(Exit::bad_data, {"x.json", "deep"}, [&] { load_config(path); });
  }
  write_text(path, deep_object("files"));
  check_fails(Exit::bad_data, {"deep"}, [&] { read_json(path); });
  write_text(dir.file("manifest.json"), deep_object("files"));
  check_fails(Exit::bad_data, {"manifest.json", "deep"}, [&] { check_manifest(dir.path.string()); });
  write_text(dir.file("tokenizer.json"), deep_object("model"));
  check_fails(Exit::bad_data, {"tokenizer.json", "deep"}, [&] { Tokenizer::load(dir.path.string()); });
  Config config = tiny_config("mudd");
  config.options["intermediate_sizes"] = nested(80000);
  check_fails(Exit::usage, {"intermediate_sizes"}, [&] { config.check(Exit::usage, "flags"); });
  write_text(dir.file("metrics.jsonl"), "{\"step\": 1, \"loss\": 2}\n" + deep_object("step") + "\n");
  CHECK(Metrics(dir.file("metrics.jsonl"), 5).curves().step.size() == 1);
  ParameterTable params;
  write_text(dir.file("model.safetensors.index.json"), deep_object("weight_map"));
  check_fails(Exit::bad_data, {"index.json", "deep"},
              [&] { load_weights(dir.path.string(), tiny_config("llama"), params); });
  const std::string header = deep_object("a");
  const uint64_t length = header.size();
  write_text(dir.file("s"), std::string(reinterpret_cast<const char*>(&length), 8) + header);
  check_fails(Exit::bad_data, {"belong"}, [&] { SafetensorsFile file(dir.file("s")); });
}
