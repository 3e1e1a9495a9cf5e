// dev/table: what the statistics of a sweep must show on the table of docs/table.md. tests/system/test_table.sh shows
// that results.json is what the records make.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "engine/io/json_file.h"
#include "eval/dunnett.h"

namespace crossply {
namespace {

using nlohmann::json;

const json& results() {
  static const json all = read_json(CROSSPLY_TABLE "/results.json");
  return all;
}

// With Muon. Seeds have numbers of their own: without blocks it does not matter which are the same.
ArmLosses losses_of(const std::string& table, const std::string& arch) {
  for (const json& row : results()["rows"]) {
    if (row["table"] != table || row["architecture"] != arch || row["optimizer"] != "muon") continue;
    ArmLosses out{arch, {}, row["seeds"] > 3 && row["compared_with"].is_string()};  // it was given more seeds
    for (const json& loss : row["losses"]) out.seeds.push_back({out.seeds.size() + 1, loss});
    return out;
  }
  FAIL("no row of ", arch, " in ", table);
  return {};
}

std::vector<ArmLosses> judged_in(const std::string& table) {
  std::vector<ArmLosses> out;
  for (const json& row : results()["rows"])
    if (row["table"] == table && row["compared_with"].is_string() && row["seeds_diverged"] == 0)
      out.push_back(losses_of(table, row["architecture"]));
  return out;
}

TEST_CASE("the backbone under other names is not found in the table of connections") {
  int64_t twins = 0;
  for (const json& row : results()["rows"]) {
    if (row["table"] != "connections" || !row["architecture"].get<std::string>().starts_with("llama@again")) continue;
    CAPTURE(row["architecture"].get<std::string>());
    CHECK(row["found"] == false);
    CHECK(row["seeds_done"] == 3);
    ++twins;
  }
  CHECK(twins == 2);
}

// A difference that is there: the backbone with so many fewer steps that the budgets predict the printed one. Three of
// its twelve seeds at a time are one more arm of the table.
TEST_CASE("a shorter backbone is found about as often as the printed difference promises") {
  const ArmLosses backbone = losses_of("connections", "llama"), shorter = losses_of("shorter", "llama");
  REQUIRE(backbone.seeds.size() == 12);
  REQUIRE(shorter.seeds.size() == 12);
  std::vector<ArmLosses> arms = judged_in("connections");
  arms.push_back({"shorter", {}});
  int64_t found = 0, choices = 0;
  for (size_t i = 0; i < 12; ++i)
    for (size_t j = i + 1; j < 12; ++j)
      for (size_t k = j + 1; k < 12; ++k) {
        arms.back().seeds = {shorter.seeds[i], shorter.seeds[j], shorter.seeds[k]};
        const Verdict verdict = against_backbone(backbone, arms).arms.back();
        found += verdict.found && verdict.difference > 0, ++choices;
      }
  CHECK(choices == 220);
  MESSAGE(found, " of ", choices, " choices of three seeds were found");
  CHECK(found >= 0.65 * 220);
  CHECK(found <= 0.95 * 220);
}

}  // namespace
}  // namespace crossply
