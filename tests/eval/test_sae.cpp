// analyze --what sae on small models, from end to end.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/look.h"
#include "eval/inside/analysis.h"
#include "eval/inside/features.h"
#include "eval/inside/sae.h"
#include "tests/support/inside.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// Sentences of a few words, numbers and lines of code.
std::string some_text() {
  std::string text;
  const char* const parts[] = {"the house of Anna ", "is not 17 or 24; ", "{ x = [3] }\n", "caf\xC3\xA9 walking ",
                               "and, so: "};
  for (uint64_t i = 0; i < 400; ++i) text += parts[random_bits(1, 2, i) % 5];
  return text;
}

// analyze --what sae of these models, on windows of a whole text.
std::vector<std::string> sae_words(const std::vector<std::string>& models, const std::string& data,
                                   const std::string& out) {
  return joined(split_words("analyze --what sae --sequences 40 --length 24 --sae-tokens 150000 --active 4 "
                            "--most-density 0.3 --split all --data " +
                            data + " --out " + out + " --model"),
                models);
}

}  // namespace

TEST_CASE("sae: two models beside each other, what is told and written, twice the same") {
  const TempDir scratch;
  const std::string data = text_file(scratch, some_text()), out = scratch.file("out");
  const std::vector<std::string> words =
      sae_words({untrained(scratch, "llama", 3, data), untrained(scratch, "satformer", 3, data)}, data, out);
  const Outcome got = run_program_inside(scratch, words);
  check_outcome(got, Exit::done, "values of layer 0: 16 numbers, 256 features, 4 active");
  check_has(got.output, {"Structural Punctuation", "of density above 30.00 %", "best features",
                         "mean gate of held-out tokens", "sae.2.safetensors"});
  check_width(got, scratch);

  const nlohmann::json json = out_json(scratch, "sae");
  REQUIRE(json["models"].size() == 2);
  for (const nlohmann::json& model : json["models"]) {
    CHECK(model["held_out"]["tokens"] == 4 * 24);
    CHECK(model["train"]["tokens"] == 24 * model["train_windows"].size());
    CHECK(model["train"]["fve"] > 0.8);
    CHECK(model["held_out"]["fve"] > 0.8);
    CHECK(model["active_on_a_token"] <= 4);
    CHECK(model["activations"].size() == 256);
    size_t labelled = 0;
    for (const auto& [category, count] : model["categories"].items()) labelled += count.get<size_t>();
    CHECK(labelled == model["retained"].size());
    CHECK(!model["retained"].empty());
    CHECK(model["of_one_token"] > 0);
    CHECK(model["categories"]["Structural"] > 0);
    for (const nlohmann::json& feature : model["retained"]) {
      if (feature["distinct_tokens"] == 1) CHECK(feature["mono_score"] == 1);
      CHECK(category_of(feature["label"]) == feature["category"].get<std::string>());
    }
  }
  CHECK(json["models"][0]["gates"].empty());
  const nlohmann::json& gates = json["models"][1]["gates"];
  REQUIRE(gates.size() == 2);  // of layers 1 and 2
  CHECK(gates[1]["layer"] == 2);
  CHECK(gates[0]["all"] > 0);
  const SafetensorsFile weights(out + "/sae.1.safetensors");
  CHECK(weights.find("W_e")->shape == std::vector<int64_t>{16, 256});
  CHECK(weights.find("W_d")->shape == std::vector<int64_t>{256, 16});
  const std::string svg = out_text(scratch, "sae.svg"), csv = out_text(scratch, "sae.csv");
  check_has(svg, {"not explained", "Multilingual Unicode", "Gates by category", "<svg x="});
  CHECK(!has(svg, "nan"));
  CHECK(has(svg, ">satformer3</text>"));
  // Bars have the colours of their models' lines.
  for (const char* arch : {"llama", "satformer"}) {
    const std::string colour = colour_of_look(static_cast<size_t>(look_of_architecture(arch)));
    CHECK_MESSAGE(has(svg, "height=\"12.0\" fill=\"" + colour + "\"/>"), arch);
  }
  CHECK(!has(svg, scratch.path.string()));
  for (size_t at = svg.find(" id=\""); at != std::string::npos; at = svg.find(" id=\"", at + 1)) {
    const std::string id = svg.substr(at, svg.find('"', at + 5) + 1 - at);
    CHECK_MESSAGE(svg.find(id, at + 1) == std::string::npos, id);
  }
  CHECK(std::count(csv.begin(), csv.end(), '\n') >=
        std::ssize(json["models"][0]["retained"]) + std::ssize(json["models"][1]["retained"]) + 1);
  check_outcome(run_program_inside(scratch, words), Exit::done, "wrote");
  CHECK(out_json(scratch, "sae") == json);
}

TEST_CASE("sae: a file has its model's place in the list, the caption each model's sizes, the limit and the paper's") {
  const TempDir scratch;
  AnalysisOptions o;
  o.data.spec = text_file(scratch, some_text()), o.split = "all", o.sequences = 4, o.length = 20;
  o.models = {scratch.file("left out"), untrained(scratch, "llama", 3, o.data.spec),
              untrained(scratch, "lime", 3, o.data.spec, 32)};
  o.out = scratch.file("");
  const std::unique_ptr<Analysis> sae = sae_analysis();
  CLI::App app;
  sae->add_flags(app);
  app.parse("--sae-tokens 500");
  for (const size_t i : {1, 2}) {
    Subject subject(o.models[i], o);
    sae->measure(subject, o);
  }
  for (const int i : {1, 2, 3}) CHECK(std::filesystem::exists(scratch.file(str("sae.", i, ".safetensors"))) == (i > 1));
  const Finding found = sae->finding(o);
  check_has(found.measured, {"llama3: at most 32 of 256", "lime3: at most 32 of 512", "48.00 %", "24.00 %",
                             "--most-density 0.005", "fits no other rule"});
}

TEST_CASE("sae: vectors that do not fit are computed again, and labels of tokens come from a file") {
  const TempDir scratch;
  const std::string data = text_file(scratch, some_text()), labels = scratch.file("labels.csv");
  const std::string model = untrained(scratch, "satformer", 3, data);
  std::string csv = "id,text,label\n";
  for (int id = 0; id < 200; ++id) csv += str(id, ",\"a, b\",Multilingual Unicode\n");
  write_text(labels, csv);
  const auto analyze = [&](const std::string& out, std::vector<std::string> more) {
    std::vector<std::string> words = sae_words({model}, data, scratch.file(out));
    words.insert(words.end(), more.begin(), more.end());
    return run_program_inside(scratch, words);
  };
  const auto model_of = [&](const std::string& out) { return read_json(scratch.file(out) + "/sae.json")["models"][0]; };
  check_outcome(analyze("all", {}), Exit::done, "wrote");
  const Outcome got = analyze("some", {"--sae-buffer", "200", "--sae-labels", labels});
  check_outcome(got, Exit::done, "labels of 200 tokens from ");
  const nlohmann::json all = model_of("all"), some = model_of("some");
  CHECK(all["buffer"] == all["train"]["tokens"]);
  CHECK(some["buffer"] == 200);
  for (const char* same : {"scale", "train_windows", "steps", "batch"}) CHECK(some[same] == all[same]);
  CHECK(some["train"]["tokens"] == all["train"]["tokens"]);
  CHECK(some["loss_curve"] != all["loss_curve"]);
  CHECK(some["variance"] == all["variance"]);
  for (const char* part : {"train", "held_out"}) CHECK(some[part]["fve"] > 0.8);
  REQUIRE(some["gates"].size() == 2);
  for (size_t n : {0, 1}) CHECK(some["gates"][n]["all"] == all["gates"][n]["all"]);
  CHECK(!some["retained"].empty());
  size_t given = 0;
  for (const nlohmann::json& feature : some["retained"]) given += feature["label"] == "Multilingual Unicode";
  CHECK(given > some["retained"].size() / 2);
  CHECK(all["labels"]["Multilingual Unicode"] < given);
  CHECK(some["labels_given"] == 200);
  check_outcome(analyze("again", {"--sae-buffer", "200", "--sae-labels", labels}), Exit::done, "wrote");
  CHECK(model_of("again")["loss_curve"] == some["loss_curve"]);
  CHECK(model_of("again")["retained"] == some["retained"]);
  write_text(labels, csv + "7,x,Nouns\n");
  check_outcome(analyze("bad", {"--sae-labels", labels}), Exit::bad_data,
                "labels.csv, line 202: label 'Nouns' of token 7");
}

TEST_CASE("sae: what is held out shares no token with what is trained on") {
  std::vector<TokenWindow> windows(20, {std::vector<int32_t>(8), {}, 8});
  for (int64_t i = 0; i < 20; ++i)
    windows[static_cast<size_t>(i)].place = 4 * i;  // the last two, at 72 and 76, are held out
  std::vector<int64_t> first17(17);
  std::iota(first17.begin(), first17.end(), 0);
  CHECK(sae_train_windows(windows, true) == first17);  // that at 68 ends at 75
  windows[3].place = 83;
  first17.erase(first17.begin() + 3);
  CHECK(sae_train_windows(windows, true) == first17);
  windows[3].place = 76;  // of a task: the same sequence, and no other is next to it
  first17.push_back(17);
  CHECK(sae_train_windows(windows, false) == first17);
}

TEST_CASE("sae: a dictionary that is too small, too few windows, and what would be lost") {
  const TempDir scratch;
  const std::string data = text_file(scratch, some_text()), out = scratch.file("out");
  const std::string model = untrained(scratch, "llama", 3, data);
  const auto analyze = [&](const std::string& more) {
    return run_program_inside(
        scratch, split_words(str("analyze --what sae --sae-tokens 500 --length 20 --split all --model ", model,
                                 " --data ", data, " ", more)));
  };
  check_outcome(analyze("--sequences 4 --dictionary 8"), Exit::done, "32 active features of a dictionary of 8");
  check_outcome(analyze("--sequences 1"), Exit::usage, "give --sequences 2 or more");
  std::filesystem::create_directories(out);
  write_text(out + "/sae.safetensors", "mine");
  check_outcome(analyze("--sequences 4 --out " + out), Exit::usage, "was not written by this program");
  CHECK(out_text(scratch, "sae.safetensors") == "mine");
  const std::string task = untrained(scratch, "lime", 3, "arith:3");  // whose answers come late
  check_outcome(test::analyze(TempDir(), {task}, "arith:3", "--what sae --sequences 4 --length 2"), Exit::usage,
                "no position of these windows is scored");
}
