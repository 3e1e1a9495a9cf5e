// Published tokenizer.json files as their writers left them, with a vocabulary that is cut short: each is read, and its
// ids are those of the package tokenizers (dev/check_tokenizers.py compares more texts).

#include "data/tokenizer.h"
#include "engine/io/json.h"
#include "tests/support/data_check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

const std::string text = "Hello  the 123 '12's\n\n  won't <|endoftext|> <s>\u00e9\u6f22 <think>";

std::string published(const std::string& name) { return CROSSPLY_PUBLISHED "/tokenizers/" + name + ".json"; }

Tokenizer read(const std::string& name) { return Tokenizer::read(published(name)); }

// The tokenizer of a changed file.
Tokenizer patched(const TempDir& dir, const std::string& name, const Json& patch) {
  Json json = known_json(read_text(published(name)));
  json.merge_patch(patch);
  write_text(dir.file("tokenizer.json"), json_text(json));
  return Tokenizer::read(dir.path.string());
}

}  // namespace

TEST_CASE("published tokenizers: sizes, prefixes and ids are those of the package") {
  struct Published {
    const char* name;
    int64_t vocab_size;
    Ids prefix, ids;
  };
  const std::vector<Published> all = {
      {"gpt2", 273, {}, {39,  68,  266, 78, 220, 262, 268, 17,  18,  220, 6,  269, 270, 265, 220, 271, 261, 6, 83,
                         220, 272, 220, 27, 82,  29,  127, 102, 162, 120, 95, 220, 27,  83,  71,  259, 74,  29}},
      {"pythia", 277, {}, {41, 70,  268, 80,  276, 85, 260, 270, 19,  20,  222, 8,  271, 272, 267, 276, 88,  263, 8,
                           85, 222, 0,   222, 29,  84, 31,  129, 104, 164, 122, 97, 222, 29,  85,  73,  261, 76,  31}},
      {"llama3", 282, {272}, {39, 68, 266, 78,  220, 262, 220, 269, 18,  220, 6,  269, 270, 265, 220, 271, 261,
                              6,  83, 220, 27,  91,  68,  77,  67,  78,  69,  83, 68,  87,  83,  91,  29,  220,
                              27, 82, 29,  127, 102, 162, 120, 95,  220, 27,  83, 71,  259, 74,  29}},
      {"qwen2", 275, {}, {39, 68,  266, 78,  220, 262, 220, 16,  17,  18,  220, 6,  16,  17, 270, 265, 220, 271, 261, 6,
                          83, 220, 272, 220, 27,  82,  29,  127, 102, 162, 120, 95, 220, 27, 83,  71,  259, 74,  29}},
      {"qwen3", 288, {}, {39,  68,  266, 78, 220, 262, 220, 16, 17, 18, 220, 6,   16,  17,  270, 265, 220,
                          271, 261, 6,   83, 220, 272, 220, 27, 82, 29, 127, 102, 162, 120, 95,  220, 286}},
      {"deepseek_v3", 280, {}, {42,  71,  269, 81,  223, 265, 223, 272, 21,  223, 9,   272, 273, 268, 223,
                                274, 264, 9,   86,  223, 30,  94,  71,  80,  70,  81,  72,  86,  71,  90,
                                86,  94,  32,  223, 30,  85,  32,  130, 105, 165, 123, 98,  223, 276}},
      {"smollm2", 278, {}, {45, 74,  272, 84,  226, 268, 226, 22, 23,  24, 226, 12, 22,
                            23, 276, 271, 226, 277, 267, 12,  89, 226, 0,  226, 33, 88,
                            35, 133, 108, 168, 126, 101, 226, 33, 89,  77, 265, 80, 35}},
      {"mistral_v01", 297, {1}, {259, 284, 260, 270, 270, 263, 259, 293, 259, 287, 288, 54,  259, 286,
                                 287, 288, 286, 266, 13,  13,  294, 274, 263, 265, 286, 261, 259, 63,
                                 127, 260, 265, 269, 263, 275, 261, 260, 123, 261, 127, 65,  259, 1,
                                 259, 198, 172, 233, 191, 165, 259, 63,  261, 267, 291, 281, 65}},
      {"mistral_v03", 297, {1}, {259, 284, 260, 270, 270, 263, 259, 293, 259, 287, 288, 54,  259, 286,
                                 287, 288, 286, 266, 13,  13,  294, 274, 263, 265, 286, 261, 259, 63,
                                 127, 260, 265, 269, 263, 275, 261, 260, 123, 261, 127, 65,  259, 1,
                                 198, 172, 233, 191, 165, 259, 63,  261, 267, 291, 281, 65}},
      {"mistral_nemo", 278, {1}, {45,  74,  272, 84,  226, 268, 226, 22,  23,  24, 226, 12, 22,  23, 276, 271, 226,
                                  277, 267, 12,  89,  226, 33,  97,  74,  83,  73, 84,  75, 89,  74, 93,  89,  97,
                                  35,  226, 1,   133, 108, 168, 126, 101, 226, 33, 89,  77, 265, 80, 35}}};
  for (const Published& want : all) {
    CAPTURE(want.name);
    const Tokenizer t = read(want.name);
    CHECK(t.vocab_size() == want.vocab_size);
    CHECK(t.prefix() == want.prefix);
    CHECK(t.encode(text) == want.ids);
  }
}

TEST_CASE("published tokenizers: a model without a type is what its keys say") {
  const TempDir dir;
  const Json untyped = {{"model", {{"type", nullptr}}}};  // takes the key away
  for (const char* name : {"gpt2", "llama3", "qwen3", "mistral_v01"}) {
    CAPTURE(name);
    CHECK(patched(dir, name, untyped) == read(name));
  }
  const auto is_foreign = [&](const Json& model, const std::string& what) {
    write_text(dir.file("tokenizer.json"), json_text(Json{{"model", model}}));
    CHECK(has(Tokenizer::load(dir.path.string()).describe(), what));
  };
  const Json vocab = {{"a", 0}};
  is_foreign(
      {{"vocab", vocab}, {"unk_token", "a"}, {"continuing_subword_prefix", "##"}, {"max_input_chars_per_word", 100}},
      "WordPiece");
  is_foreign({{"vocab", Json::array({Json::array({"a", 0.5})})}, {"unk_id", 0}}, "Unigram");
  is_foreign({{"vocab", vocab}, {"unk_token", "a"}}, "WordLevel");
  write_text(dir.file("tokenizer.json"), json_text(Json{{"model", {{"vocab", vocab}, {"unk_id", 0}}}}));
  check_fails(Exit::bad_data, {"is no tokenizer"}, [&] { Tokenizer::load(dir.path.string()); });
}

TEST_CASE("published tokenizers: keys that older writers did not have") {
  const TempDir dir;
  for (const char* name : {"llama3", "qwen3", "smollm2", "mistral_v01"})
    for (const char* key : {"fuse_unk", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"}) {
      CAPTURE(name);
      CAPTURE(key);
      CHECK(patched(dir, name, {{"model", {{key, nullptr}}}}) == read(name));
    }
  for (const char* key : {"byte_fallback", "ignore_merges"})
    CHECK(patched(dir, "qwen3", {{"model", {{key, nullptr}}}}) == read("qwen3"));
  for (const char* key : {"version", "truncation", "padding", "post_processor", "decoder"})
    CHECK(patched(dir, "qwen3", {{key, nullptr}}) == read("qwen3"));
  // Before version 0.15 a Metaspace had no prepend_scheme.
  const auto metaspace = [&](const Json& keys) { return patched(dir, "mistral_v03", {{"pre_tokenizer", keys}}); };
  const Tokenizer always = metaspace({{"prepend_scheme", "always"}}), never = metaspace({{"prepend_scheme", "never"}});
  const Json none = {{"prepend_scheme", nullptr}};
  const auto with = [](Json keys, const Json& more) { return keys.update(more), keys; };
  CHECK(metaspace(none) == always);
  CHECK(metaspace(with(none, {{"add_prefix_space", true}, {"str_rep", "\u2581"}})) == always);
  CHECK(metaspace(with(none, {{"add_prefix_space", false}})) == never);
  CHECK(metaspace({{"add_prefix_space", true}}) == read("mistral_v03"));
  CHECK(metaspace({{"prepend_scheme", "never"}, {"add_prefix_space", true}}) == never);
  CHECK((never.encode("Hi").size() + 1 == always.encode("Hi").size()));
  check_fails(Exit::bad_data, {"Metaspace", "do not fit together"}, [&] { metaspace({{"add_prefix_space", false}}); });
  check_fails(Exit::bad_data, {"Metaspace", "do not fit together"}, [&] { metaspace({{"prepend_scheme", "now"}}); });
}

TEST_CASE("published tokenizers: what transformers keeps of a truncating or padding call counts for nothing") {
  const TempDir dir, copy;
  const Json truncation = {{"direction", "Right"}, {"max_length", 4}, {"strategy", "LongestFirst"}, {"stride", 0}};
  const Json padding = {
      {"strategy", {{"Fixed", 6}}}, {"direction", "Left"}, {"pad_to_multiple_of", nullptr}, {"pad_id", 0},
      {"pad_type_id", 0},           {"pad_token", "!"}};
  const Json state = {{"truncation", truncation}, {"padding", padding}};
  for (const char* name : {"gpt2", "llama3", "mistral_v01"}) {
    CAPTURE(name);
    const Tokenizer t = patched(dir, name, state);
    CHECK((t == read(name) && t.encode(text) == read(name).encode(text)));
    // Nobody else's call is cut by it: the copy is without.
    t.save(copy.path.string());
    Json saved = known_json(read_text(copy.file("tokenizer.json")));
    CHECK((saved["truncation"].is_null() && saved["padding"].is_null()));
    CHECK(saved == known_json(read_text(published(name))));
  }
}
