// The page of the rates by width and depth: how far the best one moves.
#include "dev/figures/transfer.h"

#include <cmath>

#include "engine/io/file.h"
#include "engine/io/json.h"
#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply::figures;

namespace crossply::test {
namespace {

using nlohmann::json;

const std::vector<double> seven = {5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2};

// A record of both optimizers at seven rates from two seeds, the second of which has a best rate twice as high; Muon's
// are all five times AdamW's. Rates from `diverges` on do so.
void write_record(const TempDir& scratch, const std::string& name, double best, double lowest, double diverges = 1) {
  json runs = json::array();
  for (const char* optimizer : {"adamw", "muon"})
    for (const double rate : seven)
      for (const int seed : {1, 2}) {
        const bool muon = std::string(optimizer) == "muon", lost = rate >= diverges;
        const double loss = lowest + 0.1 * std::pow(std::log2(rate / (seed * best)), 2);
        runs.push_back({{"name", "llama"},
                        {"optimizer", optimizer},
                        {"lr", muon ? 4e-3 : rate},
                        {"muon_lr", muon ? json(5 * rate) : json()},
                        {"seed", seed},
                        {"state", lost ? "failed" : "done"},
                        {"test_loss", lost ? json() : json(loss)},
                        {"parameters", 1000},
                        {"flops_per_token", 6000},
                        {"tokens_per_step", 64},
                        {"steps_done", 20},
                        {"evaluations", json::object()}});
      }
  const json record = {{"format", "crossply record"},
                       {"data_digest", "abc"},
                       {"flags", json::object()},
                       {"architectures", json::array()},
                       {"runs", runs}};
  write_text(scratch.file(name + ".json"), json_text(record));
}

}  // namespace

TEST_CASE("transfer's page: the best rate by a parabola, and how far it is from the base's, by all seeds and each") {
  const TempDir scratch;
  write_record(scratch, "base", 4e-3, 2.5);
  write_record(scratch, "width-128-none", 2e-3, 2.25, 3.2e-2);
  write_record(scratch, "width-128-completep", 4e-3, 2.25);
  Page page(scratch.path.string(), "Title");
  transfer(page);
  page.finish();
  const std::string text = read_text(scratch.file("results.md"));
  // Between 4e-3 and 8e-3: sqrt(2) times the first seed's, where each seed is half a factor of 2 off.
  CHECK(has(text, "| C = 64, L = 4 |  | 0.00566 |  | 2.525 |  |"));
  CHECK(has(text, "| C = 128, L = 4 | without rules | 0.00283 | -1.00 (-1.00, -1.00) | 2.275 | +0.100 |"));
  CHECK(has(text, "| C = 128, L = 4 | with --transfer | 0.00566 | +0.00 (+0.00, +0.00) | 2.275 | +0.000 |"));
  CHECK(has(text, "| C = 64, L = 4 |  | 0.0283 |  | 2.525 |  |"));  // of Muon
  CHECK(!has(text, "by depth"));                                    // of which there are no records
  const std::string svg = read_text(scratch.file("width-adamw.svg"));
  CHECK(has(svg, "test loss, without rules"));
  CHECK(has(svg, "test loss, with --transfer"));
  CHECK(has(svg, "marks: the best rate"));
  CHECK(has(svg, "C = 128, L = 4"));
  CHECK(path_exists(scratch.file("width-muon.svg")));
}

TEST_CASE("transfer's page: there is none without the base shape's record") {
  const TempDir scratch;
  write_record(scratch, "width-128-none", 2e-3, 2.25);
  Page page(scratch.path.string(), "Title");
  transfer(page);
  page.finish();
  CHECK(!path_exists(scratch.file("results.md")));
}

}  // namespace crossply::test
