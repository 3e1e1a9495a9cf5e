// The routing in metrics.jsonl: what analyze says of the same model, at every evaluation, without a bit of change.
#include "engine/io/json.h"
#include "eval/inside/routing/routing_summary.h"

#include "eval/inside/routing/routing.h"
#include "tests/support/cases.h"
#include "tests/support/inside.h"
#include "train/lab/routing_curves.h"
#include "train/run/metrics.h"

using namespace crossply;
using namespace crossply::test;
using nlohmann::json;

namespace {

// Sequences of random tokens, all of them scored up to one place.
class Sequences : public Source {
 public:
  Sequences(int64_t vocabulary, int64_t count) : vocabulary_(vocabulary), count_(count) {}
  int64_t size() const override { return count_; }
  int64_t seq_len() const override { return TinyModel::T; }
  int64_t vocab_size() const override { return vocabulary_; }
  void read(int64_t index, int32_t* tokens, int32_t* targets) const override {
    for (int64_t t = 0; t < seq_len(); ++t) {
      tokens[t] = static_cast<int32_t>(random_bits(3, static_cast<uint64_t>(index), static_cast<uint64_t>(t)) %
                                       static_cast<uint64_t>(vocabulary_));
      targets[t] = t + 2 < seq_len() ? 1 : -1;
    }
  }

 private:
  int64_t vocabulary_, count_;
};

// NaN is null, and six digits stay.
void check_number(const json& got, double want) {
  CHECK(got.is_number() == std::isfinite(want));
  if (got.is_number()) CHECK(std::abs(got.get<double>() - want) <= 1e-5 * std::abs(want) + 1e-12);
}

std::vector<json> lines_of(const std::string& run) {
  std::vector<json> lines;
  each_line(run + "/metrics.jsonl", [&](const std::string& text, bool) { lines.push_back(known_json(text)); });
  return lines;
}

const std::vector<std::string> small = split_words(
    "--data arith:3 --train-samples 60 --test-samples 12 --width 16 --ffn 24 --layers 4 --heads 2 --batch 4 "
    "--answer-samples 0 --lr 0.01 --eval-samples 4");

Outcome train_small(const TempDir& dir, const std::string& arch, const std::string& out, const std::string& more) {
  return train(dir, joined(small, std::vector<std::string>{"--out", out}, split_words(more)), arch);
}

}  // namespace

TEST_CASE("routing summary: every architecture's numbers are those of analyze on the same sequences") {
  for (const Case& c : cases()) {
    if (!has_learned_routing(c.config)) continue;
    CAPTURE(c.name);
    TinyModel model(c.config);
    const Sequences source(c.config.vocab_size, 3);
    const json got = routing_summary(*model.device, model.params, model.config, source, {});

    const Routings routings = find_routings(c.config);
    const bool reads_data = routings.reads_data();
    std::vector<TokenWindow> windows;
    for (int64_t i = 0; i < source.size() && reads_data; ++i) {
      TokenWindow window{std::vector<int32_t>(TinyModel::T), std::vector<int32_t>(TinyModel::T), TinyModel::T - 2};
      source.read(i, window.tokens.data(), window.targets.data());
      windows.push_back(window);
    }
    Probe probe(*model.device, model.params, model.config, 1, reads_data ? TinyModel::T : routing_tokens, "tiny");
    const RoutingFound want = routings.look({probe, model.params, model.config, "tiny", windows});
    REQUIRE(!want.facts.empty());
    CHECK(got["numbers"].size() == want.facts.size());
    for (const auto& [name, value] : want.facts) check_number(got["numbers"].at(name), value);
    for (const RoutingCurve& curve : want.curves)
      for (size_t i = 0; i < curve.y.size() && !curve.reference; ++i)
        check_number(got["curves"].at(curve.name).at(i), curve.y[i]);
    if (want.bands.empty()) continue;
    for (const RoutingMap& map : want.bands[0].maps)
      for (size_t r = 0; r < map.rows.size(); ++r)
        for (size_t s = 0; s < map.rows[r].size(); ++s) {
          const json& row = got["maps"].at(map.name).at(r);
          check_number(s < row.size() ? row[s] : json(), map.rows[r][s]);
        }
    CHECK(json_text(got).find(' ') == std::string::npos);  // one line, without room to spare
  }
}

TEST_CASE("routing summary: entropy and shares of a map, by hand") {
  RoutingFound found;
  const RoutingRows rows = {{1, NAN, NAN}, {-1, 1, NAN}, {1, 0, -3}};
  found.bands = {{"", HeatScale::signs, {{"m", "", rows}}}};
  add_summary(found);
  std::map<std::string, double> facts(found.facts.begin(), found.facts.end());
  const double third = -(0.25 * std::log(0.25) + 0.75 * std::log(0.75));
  CHECK(facts.at("entropy.m") == doctest::Approx((0 + std::log(2.0) + third) / 3));
  CHECK(facts.at("newest_share.m") == doctest::Approx((0.5 + 0.75) / 2));  // of rows with a choice
  CHECK(facts.at("first_share.m") == doctest::Approx((0.5 + 0.25) / 2));
  CHECK(!has_learned_routing(tiny_config("llama")));
  CHECK(!has_learned_routing(tiny_config("sla")));
}

TEST_CASE("routing summary: evaluations write it, training keeps its bits, and a resumed run keeps its lines") {
  for (const std::string arch : {"vertical", "satformer", "lime"}) {
    CAPTURE(arch);
    const TempDir dir;
    const std::string often = dir.file("often"), seldom = dir.file("seldom"), resumed = dir.file("resumed");
    check_outcome(train_small(dir, arch, often, "--steps 6 --eval-every 2 --tensorboard --csv"), Exit::done, "");
    check_outcome(train_small(dir, arch, seldom, "--steps 6 --eval-every 100"), Exit::done, "");
    CHECK(read_text(often + "/step_00000006/model.safetensors") ==
          read_text(seldom + "/step_00000006/model.safetensors"));
    const std::vector<json> lines = lines_of(often);
    REQUIRE(lines.size() == 6);
    for (size_t i = 0; i < lines.size(); ++i) CHECK(lines[i].contains("routing") == (i % 2 == 1));
    CHECK(lines[1]["routing"] != lines[5]["routing"]);
    CHECK(!has(read_text(often + "/metrics.csv"), "routing"));

    // Stopped after step 2, at a checkpoint: the line of step 2 stays as it is.
    check_outcome(train_small(dir, arch, resumed, "--steps 6 --eval-every 2 --save-every 2 --keep 9"), Exit::done, "");
    for (const char* step : {"/step_00000004", "/step_00000006"}) std::filesystem::remove_all(resumed + step);
    check_outcome(train(dir, {"--resume", "--out", resumed}, arch), Exit::done, "resumed after step 2");
    const std::vector<json> again = lines_of(resumed);
    REQUIRE(again.size() == 6);
    for (size_t i = 1; i < again.size(); i += 2) CHECK(again[i]["routing"] == lines[i]["routing"]);
    CHECK(!std::filesystem::exists(resumed + "/metrics.jsonl.kept-1"));

    // What curves reads of it.
    const auto points = read_routing(often + "/metrics.jsonl", "tokens", 2);
    REQUIRE(points.size() == 3);
    CHECK(points[2].step == 6);
    CHECK(points[2].x == 2 * lines[5]["tokens"].get<double>());
    for (const auto& [name, value] : points[2].numbers) CHECK(value == lines[5]["routing"]["numbers"][name]);
  }
}

TEST_CASE("routing summary: the last evaluation says what analyze says of the model") {
  const TempDir dir;
  const std::string run = dir.file("run"), out = dir.file("seen");
  check_outcome(train_small(dir, "lime", run, "--steps 4"), Exit::done, "");
  check_outcome(
      run_program_inside(dir, {"analyze", "--model", run, "--data", "arith:3", "--what", "routing", "--out", out}),
      Exit::done, "");
  const json analyzed = read_json(out + "/routing.json")["models"][0], seen = lines_of(run).back()["routing"];
  REQUIRE(seen["numbers"].size() == 3);
  for (const auto& [name, value] : seen["numbers"].items()) check_number(value, analyzed["numbers"].at(name));
  const json& rows = analyzed["maps"]["layer_map"]["rows"];
  for (size_t r = 0; r < rows.size(); ++r) {
    CHECK(seen["maps"]["layer_map"][r].size() == r + 1);
    for (size_t c = 0; c <= r; ++c) check_number(seen["maps"]["layer_map"][r][c], rows[r][c]);
  }
}
