// The plan of a sweep: which tables it has, and what is said of one that is none.
#include "train/lab/sweep_plan.h"

#include "tests/support/check.h"
#include "tests/support/temp_dir.h"

using namespace crossply;
using namespace crossply::test;

namespace {

SweepPlan parse(const std::string& text) { return parse_sweep_plan(text, "x.plan"); }

void refused(const std::string& text, const std::string& why) {
  check_fails(Exit::bad_data, {why}, [&] { parse(text); });
}

}  // namespace

TEST_CASE("sweep plan: shared lines, tables, lists without spaces, switches, lines that go on") {
  const SweepPlan plan = parse(
      "# about\n"
      "data = my text.txt   # with a space\n"
      "lr = 1e-3, 2e-3\n"
      "hold-decay\n"
      "\n"
      "[first]\r\n"
      "arch = llama, mudd:intermediate_sizes=[8, 16]\n"
      "       lime\n"
      "lr = 4e-3\n"
      "[second-1]\n"
      "arch = llama\n");
  REQUIRE(plan.tables.size() == 2);
  CHECK(plan.tables[0].name == "first");
  CHECK(plan.tables[0].where == "x.plan:6");
  CHECK(plan.tables[0].flags == std::vector<std::string>{"--data", "my text.txt", "--lr", "4e-3", "--hold-decay",
                                                         "--arch", "llama,mudd:intermediate_sizes=[8,16],lime"});
  CHECK(plan.tables[1].flag("--lr") == "1e-3,2e-3");
  CHECK(plan.tables[1].flag("--steps").empty());
  CHECK(plan.text == parse("data = my text.txt\nlr = 1e-3, 2e-3\nhold-decay\n[first]\narch = llama, "
                           "mudd:intermediate_sizes=[8, 16]\n  lime\nlr = 4e-3\n\n[second-1]\narch = llama")
                         .text);
}

TEST_CASE("sweep plan: several layers and widths are a table each, and so are budgets") {
  const SweepPlan plan = parse(
      "[d]\n"
      "arch = llama:loop=anchor, lime\n"
      "layers = 4, 8\n"
      "width = 64, 96\n"
      "heads = 2, 3\n"
      "ffn = 128\n"
      "steps = 100\n"
      "warmup = 5\n"
      "cooldown = 0\n"
      "backbone-seeds = 1, 2\n"
      "more-seeds\n"
      "pairs = blimp\n"
      "budgets = 0.5, 1.4\n");
  REQUIRE(plan.tables.size() == 12);
  CHECK(plan.tables[0].name == "d-L4-C64");
  CHECK(plan.tables[0].flag("--layers") == "4");
  CHECK(plan.tables[0].flag("--heads") == "2");
  CHECK(plan.tables[0].flag("--ffn") == "128");
  CHECK(plan.tables[0].of.empty());
  const PlannedTable& half = plan.tables[1];
  CHECK(half.name == "d-L4-C64-x0.5");
  CHECK(half.of == "d-L4-C64");
  CHECK(half.budget == 0.5);
  CHECK(half.flags == std::vector<std::string>{"--arch", "llama:loop=anchor", "--layers", "4", "--width", "64",
                                               "--heads", "2", "--ffn", "128", "--steps", "50", "--warmup", "3",
                                               "--cooldown", "0"});  // as a share, which 0 leaves to the program
  CHECK(plan.tables[2].flag("--steps") == "140");
  CHECK(plan.tables[9].name == "d-L8-C96");
  CHECK(plan.tables[9].flag("--heads") == "3");
  CHECK(plan.tables[9].flag("--backbone-seeds") == "1,2");
}

TEST_CASE("sweep plan: what is none is refused with its line") {
  refused("", "x.plan: there is no table");
  refused("data = x\n", "there is no table");
  refused("[a]\n--data = x\n", "x.plan:2: a line is a flag of compare without its dashes, '--data' is none");
  refused("[a]\n= x\n", "x.plan:2");
  refused("[a\n", "x.plan:1: a table is named");
  refused("[../a]\n", "x.plan:1: a table is named");
  refused("[A]\n", "x.plan:1: a table is named");
  refused("[]\n", "x.plan:1: a table is named");
  refused("[a]\n[a]\n", "x.plan:2: there is a table a already, by x.plan:1");
  refused("  x\n[a]\n", "x.plan:1: an indented line goes on with one above");
  refused("[a]\nwidth = 8, 16\nheads = 1, 2, 4\n", "x.plan:1: heads has 3 values, width 2");
  refused("[a]\narch = llama\nsteps = 10\nbudgets = 1\n", "'1' is none");
  refused("[a]\narch = llama\nsteps = 10\nbudgets = x\n", "'x' is none");
  refused("[a]\narch = llama\nbudgets = 2\n", "budgets are times steps");
  const TempDir scratch;
  check_fails(Exit::no_input, {"nowhere"}, [&] { read_sweep_plan(scratch.file("nowhere")); });
}
