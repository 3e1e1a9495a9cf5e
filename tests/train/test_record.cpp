// Records of experiments: which runs stand for an architecture, how they are paired, and what the tables make of them.
#include "dev/figures/record.h"

#include "cli/dots.h"
#include "cli/format.h"
#include "dev/figures/page.h"
#include "engine/io/json.h"
#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply::figures;

namespace crossply::test {
namespace {

using nlohmann::json;

struct Line {
  std::string name;
  double lr;
  int seed;
  json loss;
  std::string state = "done";
};

json run_of(const Line& line, const std::string& data) {
  return {{"name", line.name},
          {"options", json::object()},
          {"lr", line.lr},
          {"seed", line.seed},
          {"state", line.state},
          {"error", line.state == "failed" ? "loss nan" : ""},
          {"steps_done", 20},
          {"parameters", 1000},
          {"flops_per_token", 6000.5},
          {"memory_bytes", 4096},
          {"tokens_per_second", 512.5},
          {"tokens_per_step", 64},
          {"training_seconds", 2.5},
          {"runs_side_by_side", line.seed == 1 ? 1 : 2},
          {"train_loss", 1.0},
          {"test_loss", line.loss},
          {"answers", nullptr},
          {"steps_valid", nullptr},
          {"evaluations",
           {{"step", {10, 20}},
            {"test_loss", {9.5, line.loss}},
            {"answer_step", json::array()},
            {"answers", json::array()},
            {"steps_valid", json::array()}}},
          {"environment", {{"build", "b"}, {"machine", "m"}, {"device", line.seed == 3 ? "other" : "cpu"}}},
          {"flags",
           {{"lr", line.lr},
            {"seed", line.seed},
            {"data", data},
            {"steps", 20},
            {"config", {{"hidden_size", 8}, {"arch", line.name}}}}}};
}

// results.json of a comparison of these runs, which chose these rates, in a directory; its record, read back.
Record record_of(const TempDir& scratch, const std::vector<Line>& lines, const std::map<std::string, json>& rates,
                 const std::string& digest = "abc") {
  json all = {{"data_digest", digest}, {"runs", json::array()}, {"architectures", json::array()}};
  for (const Line& line : lines) all["runs"].push_back(run_of(line, "/a/secret/place/text.bin"));
  for (const auto& [name, lr] : rates)
    all["architectures"].push_back({{"name", name}, {"lr", lr}, {"lr_at_edge", lr == 0.1}, {"seeds_done", 1}});
  write_text(scratch.file("results.json"), json_text(all));
  write_text(scratch.file("small.json"), make_record(scratch.path.string()));
  return read_record(scratch.file("small.json"));
}

// The comparison passed over lime's best rate with the first seed, because another seed failed there.
const std::vector<Line> example = {{"llama", 0.1, 1, 5.0},
                                   {"llama", 0.2, 1, 4.0},
                                   {"llama", 0.4, 1, 4.5},
                                   {"llama", 0.2, 2, 4.25},
                                   {"llama", 0.2, 3, 4.5},
                                   {"lime", 0.1, 1, 3.0},
                                   {"lime", 0.2, 1, 2.5},
                                   {"lime", 0.2, 2, nullptr, "failed"},
                                   {"lime", 0.1, 2, 4.0},
                                   {"lime", 0.1, 3, 9.0, "stopped"},
                                   {"hyper", 0.1, 1, nullptr, "failed"},
                                   {"relay", 0.2, 1, nullptr, "failed"}};
const std::map<std::string, json> rates = {{"hyper", nullptr}, {"lime", 0.1}, {"llama", 0.2}, {"relay", 0.2}};

}  // namespace

TEST_CASE("record: an architecture is its runs at the rate that the comparison chose") {
  const TempDir scratch;
  const Record record = record_of(scratch, example, rates);
  REQUIRE(record.arms.size() == 2);  // of hyper and relay no run is done
  const RecordedArm &lime = record.arm("lime"), &llama = record.arm("llama");
  CHECK(llama.lr == 0.2);
  CHECK(!llama.at_edge);
  CHECK(values_of(llama, test_loss_of) == std::vector<double>{4.0, 4.25, 4.5});
  CHECK(lime.lr == 0.1);
  CHECK(lime.at_edge);
  CHECK(values_of(lime, test_loss_of) == std::vector<double>{3.0, 4.0});  // not the one that was stopped
  CHECK(lime.lost.empty());
  CHECK(differences_of(lime, llama, test_loss_of) == std::vector<double>{-1.0, -0.25});
  CHECK(values_of(llama, answers_of).empty());
  check_fails(Exit::bad_data, {"small", "hyper"}, [&] { record.arm("hyper"); });
  const RecordedRun& run = llama.runs.at(1);
  CHECK(run.tokens == 1280);
  CHECK(run.tokens_per_second == 512.5);
  CHECK(std::isnan(llama.runs.at(2).tokens_per_second));  // it shared the machine
  CHECK(run.loss == std::vector<double>{9.5, 4.0});
  std::map<std::string, json> other = rates;
  other["lime"] = 0.2;
  const ArmLosses losses = losses_of(record_of(scratch, example, other).arm("lime"));
  REQUIRE(losses.seeds.size() == 2);
  CHECK(losses.seeds[1].seed == 2);
  CHECK(losses.losses() == std::vector<double>{2.5});
  CHECK(losses.diverged());
}

TEST_CASE("record: it has the flags that all runs share, each environment once, and no path") {
  const TempDir scratch;
  record_of(scratch, example, rates);
  const std::string text = read_text(scratch.file("small.json"));
  const json all = known_json(text);
  CHECK(all["flags"] == json({{"data", "text.bin"}, {"steps", 20}, {"config", {{"hidden_size", 8}}}}));
  CHECK(all["environments"].size() == 2);
  CHECK(all["runs"][4]["environment"] == 1);
  CHECK(all["runs"].size() == example.size());
  CHECK(!has(text, "secret"));
  CHECK(!has(text, scratch.path.string()));
}

TEST_CASE("record: what is no comparison, or no record, is refused") {
  const TempDir scratch;
  check_fails(Exit::no_input, {"nothing/results.json"}, [&] { make_record(scratch.file("nothing")); });
  write_text(scratch.file("results.json"), R"({"data_digest": null, "runs": []})");
  check_fails(Exit::bad_data, {"no run"}, [&] { make_record(scratch.path.string()); });
  write_text(scratch.file("results.json"), R"({"data_digest": null, "runs": [{"state": "done"}]})");
  check_fails(Exit::bad_data, {"\"flags\" is missing"}, [&] { make_record(scratch.path.string()); });
  const std::string other = scratch.file("other.json"), head = R"({"format": "crossply record", "flags": {}, "runs": )";
  for (const std::string runs :
       {R"([{"name": "lime"}])", R"([{"name": 3, "seed": 1}])", R"([{"name": "a", "seed": -1}])", R"([7])"}) {
    write_text(other, head + runs + "}");
    check_fails(Exit::bad_data, {"other.json"}, [&] { read_record(other); });
  }
  write_text(other, R"({"format": "crossply comparison"})");
  check_fails(Exit::bad_data, {"other.json: is no record"}, [&] { read_record(other); });
}

TEST_CASE("record: arms of a baseline are one family, as eval/dunnett.h judges it") {
  RecordedArm a{"a"}, b{"b"}, c{"c"}, d{"d"}, lost{"lost"}, one{"one"};
  for (const auto& [seed, x, y, z] : {std::tuple{1u, 1.00, 2.02, 1.5}, {2u, 1.10, 2.10, 1.6}, {3u, 1.20, 2.18, 1.71}}) {
    a.runs[seed].test_loss = x, b.runs[seed].test_loss = y;
    c.runs[seed].test_loss = z, d.runs[seed].test_loss = z + x;
    lost.runs[seed].test_loss = z;
  }
  lost.runs.erase(3), lost.lost = {3};
  one.runs[1].test_loss = 2;
  // a itself, and an arm of which a seed failed, are not judged, and leave the others what they are.
  const FamilyVerdict family = judge(a, {{"a", a}, {"b", b}, {"lost", lost}, {"c", c}});
  const FamilyVerdict plain = against_backbone(losses_of(a), {losses_of(b), losses_of(c)});
  CHECK(family.blocks);
  CHECK(family.arms_degrees == 4);
  CHECK(family.arms_sd == doctest::Approx(plain.arms_sd).epsilon(1e-12));
  CHECK(family.critical == plain.critical);
  CHECK(!family.arms[0].tested);
  CHECK(!family.arms[2].tested);
  CHECK(family.arms[1].difference == doctest::Approx(1));
  CHECK(family.arms[1].interval == plain.arms[0].interval);
  CHECK(verdict_text(b, a, family.arms[1]) == "**higher**");
  CHECK(verdict_text(lost, a, family.arms[2]) == "a seed failed");
  CHECK(difference_text(family.arms[1], "%.2f") == format_number("+1.00 ± %.2f", family.arms[1].interval));
  // Those beside it count once, of the same data and sizes alone.
  CHECK(judge(a, {{"b", b}}, {a, b, c, d, lost}).arms_degrees == 6);
  c.setting = "other";
  CHECK(judge(a, {{"b", b}}, {a, b, c, d}).arms_degrees == 4);
  // An arm of fewer seeds makes all of them unpaired.
  const FamilyVerdict ragged = judge(a, {{"b", b}, {"one", one}});
  CHECK(!ragged.blocks);
  CHECK(ragged.arms[1].difference == doctest::Approx(0.9));
  CHECK(ragged.arms[1].tested);
  const Verdict alone = judge(one, {{"b of one seed", one}}).arms[0];
  CHECK(verdict_text(one, one, alone) == "one seed");
  CHECK(difference_text(alone, "%.4f") == "+0.0000");
}

TEST_CASE("record: the table calls a difference only where the interval leaves out 0, and compares only the like") {
  const TempDir scratch;
  std::vector<Line> lines = example;
  for (const auto& [seed, loss] : {std::pair{1, 4.5}, {2, 4.74}, {3, 5.01}})
    lines.push_back({"worse", 0.2, seed, loss});
  lines.push_back({"broken", 0.2, 1, 3.0}), lines.push_back({"broken", 0.2, 2, nullptr, "failed"});
  std::map<std::string, json> chosen = rates;
  chosen["worse"] = chosen["broken"] = 0.2;
  const Record record = record_of(scratch, lines, chosen);
  const RecordedArm &llama = record.arm("llama"), &worse = record.arm("worse");
  Page page(scratch.path.string(), "Title");
  const std::vector<LabelledArm> some = {{"llama", llama}, {"worse", worse}}, lime = {{"lime", record.arm("lime")}};
  page.differences("dots.svg", "Differences", {{"same seeds", llama, some}});
  page.differences("all.svg", "All", {{"all of them", llama, arms_but(record, "")}});
  page.differences("two.svg", "Two", {{"first", llama, some}, {"second", llama, lime}});
  page.finish();
  const std::string table = read_text(scratch.file("results.md"));
  // The residuals of llama and worse are 0, 0.005, -0.005 and the opposite.
  const double half = dunnett_critical(3, 0, {3}, 2) * std::sqrt(1e-4 / 2 * 2 / 3);
  const std::string row = "| worse | 1,000 | 6000 | 0.2 | 3 | 4.7500 ± 0.2551 | ";
  CHECK(has(table, row + format_number("+0.5000 ± %.4f | **higher** |", half)));
  CHECK(has(table, "| llama | 1,000 | 6000 | 0.2 | 3 | 4.2500 ± 0.2500 |  |  |"));
  CHECK(has(table,
            "Against llama: deviation of what arms and seeds leave 0.0071, 2 degrees of freedom, critical value " +
                format_number("%.3f; 80 %% of repeats would find a difference of ", dunnett_critical(3, 0, {3}, 2))));
  // lime lacks a seed, so that nothing is paired: the deviation is that of 3 + 3 + 2 seeds around three means.
  const FamilyVerdict three = judge(llama, {{"worse", worse}, lime[0]});
  CHECK(three.arms_degrees == 5);
  const std::string third = format_number("-0.7500 ± %.4f | cannot be told |", three.arms[1].interval);
  CHECK(has(table, "| lime | 1,000 | 6000 | 0.1 (edge) | 2 | 3.5000 ± 0.7071 | " + third));
  CHECK(has(table, row + format_number("+0.5000 ± %.4f | cannot be told |", three.arms[0].interval)));
  CHECK(has(table, "Against llama: deviation 0.3886, 5 degrees of freedom"));
  CHECK(has(table, "| broken | 1,000 | 6000 | 0.2 | 1, 1 failed | 3.0000 | -1.2500 | a seed failed |"));
  // Two groups of one baseline are one family, of which one line speaks.
  const std::string two = table.substr(table.find("## Two"));
  CHECK(has(two, third));
  CHECK(two.find("Against llama") == two.rfind("Against llama"));
  const std::string picture = read_text(scratch.file("dots.svg")), all = read_text(scratch.file("all.svg"));
  CHECK(has(picture, "same seeds"));
  CHECK(has(picture, format_number("+0.500 ± %.3f", half)));
  CHECK(has(all, "\u22120.750 ± "));  // of means, though the dots are of the two seeds that both have
  const Record other = record_of(scratch, lines, chosen, "other data");
  check_fails(Exit::bad_data, {"cannot be compared", "other data"}, [&] {
    page.differences("dots.svg", "D", {{"", llama, arms_but(other, "llama")}});
  });
}

TEST_CASE("dots: rows without values are left out, and one seed has no interval") {
  const std::string picture = dots_svg({"T", "x", {{"", {{"none", {}}, {"one", {0.25}}}}, {"empty", {}}}, true, false});
  CHECK(!has(picture, "none"));
  CHECK(!has(picture, "empty"));
  CHECK(has(picture, "25.0 (one seed)"));
  CHECK(!has(picture, "nan"));
}

}  // namespace crossply::test
