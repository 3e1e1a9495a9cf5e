#include "train/run/metrics.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/io/json.h"
#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

TEST_CASE("metrics: a row of metrics.csv has a cell for every column, also where a step lacks the number") {
  const TempDir dir;
  const std::string path = dir.file("metrics.csv");
  write_text(dir.file("metrics.jsonl"), "");
  MetricsTable table(path, dir.file("metrics.jsonl"));
  table.write({{"step", 1}, {"loss", 2.5}, {"lr", 0.25}});
  table.write({{"step", 2}, {"loss", 2.25}, {"lr", 0.125}, {"test_loss", 2.75}});
  std::istringstream lines(read_text(path));
  std::vector<std::string> rows;
  for (std::string row; std::getline(lines, row);) rows.push_back(row);
  REQUIRE(rows.size() == 3);
  for (const std::string& row : rows) CHECK(std::ranges::count(row, ',') == std::ranges::count(rows[0], ','));
  CHECK(rows[0].starts_with("step,"));
  CHECK(rows[1].starts_with("1,"));
  // The column of the test loss is empty in the first row only.
  const auto cell = [&](const std::string& row, const std::string& column) {
    std::istringstream header(rows[0]), cells(row + ",");
    std::string name, value;
    while (std::getline(header, name, ',') && std::getline(cells, value, ','))
      if (name == column) return value;
    return std::string("no such column");
  };
  CHECK(cell(rows[1], "test_loss") == "");
  CHECK(cell(rows[2], "test_loss") == "2.75");
  CHECK(cell(rows[2], "lr") == "0.125");
}
