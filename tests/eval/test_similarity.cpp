// Linear CKA: what it is on paper, what does not change it, and the program.
#include "engine/io/json_file.h"
#include "eval/inside/similarity.h"

#include <set>

#include "cli/format.h"
#include "engine/io/json.h"
#include "tests/support/inside.h"

using namespace crossply;
using namespace crossply::test;

namespace {

StateRows random_rows_of(int64_t n, int64_t C, uint64_t seed) {
  StateRows features{C, {}};
  for (int64_t i = 0; i < n * C; ++i) features.x.push_back(random_normal(seed, 3, static_cast<uint64_t>(i)));
  return features;
}

double cka_of(StateRows a, StateRows b) {
  const int64_t n = std::ssize(a.x) / a.columns;
  centre_columns(a, n), centre_columns(b, n);
  const auto all = linear_cka({&a, &b}, n);
  CHECK((all[0][1] == all[1][0] || std::isnan(all[1][0])));
  return all[0][1];
}

// By the products of the columns: |B^T A|^2 / (|A^T A| |B^T B|).
double cka_by_columns(const StateRows& a, const StateRows& b, int64_t n) {
  const auto square = [n](const StateRows& x, const StateRows& y) {
    double sum = 0;
    for (int64_t i = 0; i < x.columns; ++i)
      for (int64_t j = 0; j < y.columns; ++j) {
        double product = 0;
        for (int64_t t = 0; t < n; ++t)
          product += x.x[static_cast<size_t>(t * x.columns + i)] * y.x[static_cast<size_t>(t * y.columns + j)];
        sum += product * product;
      }
    return sum;
  };
  return square(a, b) / std::sqrt(square(a, a) * square(b, b));
}

// Every two neighbouring columns turned by an angle, the others negated; times a scale, and moved.
StateRows rotated(StateRows features, double scale) {
  const int64_t C = features.columns, n = std::ssize(features.x) / C;
  for (int64_t t = 0; t < n; ++t) {
    double* const row = features.x.data() + t * C;
    for (int64_t c = 0; c + 1 < C; c += 2) {
      const double first = row[c], angle = 0.3 + static_cast<double>(c);
      row[c] = std::cos(angle) * first - std::sin(angle) * row[c + 1];
      row[c + 1] = std::sin(angle) * first + std::cos(angle) * row[c + 1];
    }
    for (int64_t c = 0; c < C; ++c) row[c] = scale * row[c] + 5;
  }
  return features;
}

}  // namespace

TEST_CASE("similarity: linear CKA is what the products of columns give, of fewer tokens than columns and of more") {
  for (const int64_t n : {5, 33, 100}) {
    CAPTURE(n);
    StateRows list[] = {random_rows_of(n, 7, 1), random_rows_of(n, 40, 2), random_rows_of(n, 1, 3)};
    list[2].x.assign(list[0].x.begin(), list[0].x.begin() + n);
    for (StateRows& one : list) centre_columns(one, n);
    const auto all = linear_cka({&list[0], &list[1], &list[2]}, n);
    for (size_t i = 0; i < 3; ++i)
      for (size_t j = 0; j < 3; ++j)
        CHECK(all[i][j] == doctest::Approx(cka_by_columns(list[i], list[j], n)).epsilon(1e-12));
  }
}

TEST_CASE("similarity: 1 with itself, however rotated, scaled and moved; small where nothing is in common") {
  const StateRows x = random_rows_of(600, 6, 1);
  CHECK(cka_of(x, x) == doctest::Approx(1).epsilon(1e-14));
  for (const double scale : {1.0, -1e-3, 1e6}) CHECK(cka_of(x, rotated(x, scale)) == doctest::Approx(1).epsilon(1e-9));
  CHECK(cka_of(x, random_rows_of(600, 6, 2)) < 0.03);  // about 6 / 600
  // Two of four columns of the same spread in common: 2 / 4.
  StateRows four = random_rows_of(20000, 4, 3);
  const StateRows other = random_rows_of(20000, 2, 4);
  const StateRows before = four;
  for (size_t t = 0; t < 20000; ++t) four.x[4 * t] = other.x[2 * t], four.x[4 * t + 1] = other.x[2 * t + 1];
  centre_columns(four, 20000);
  StateRows centred = before;
  centre_columns(centred, 20000);
  CHECK(cka_by_columns(four, centred, 20000) == doctest::Approx(0.5).epsilon(0.02));
  // What is the same for all tokens has nothing in common with anything, itself too.
  for (const double number : {0.1f * 1.0, 0.1, 1e30})
    CHECK(std::isnan(cka_of(x, {2, std::vector<double>(1200, number)})));
  // Numbers as large as a float's are no more than others.
  StateRows large = x;
  for (double& number : large.x) number *= 1e38;
  CHECK(cka_of(x, large) == doctest::Approx(1).epsilon(1e-12));
}

TEST_CASE("similarity: a sample has as many different tokens as asked for, each with the same chance") {
  CHECK(sample_tokens(3, 5, 1) == std::vector<int64_t>{0, 1, 2});
  std::vector<int> drawn(10);
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    const std::vector<int64_t> sample = sample_tokens(10, 3, seed);
    CHECK(std::is_sorted(sample.begin(), sample.end()));
    CHECK(std::set<int64_t>(sample.begin(), sample.end()).size() == 3);
    for (const int64_t one : sample) ++drawn[static_cast<size_t>(one)];
  }
  for (const int times : drawn) CHECK(std::abs(times - 900) < 126);  // 5 deviations
}

TEST_CASE("similarity: of models of different depths, in table, JSON, CSV and picture") {
  const TempDir scratch;
  save_tiny(scratch.file("four"), "llama");
  save_tiny(scratch.file("two"), "hyper", 2);
  save_tiny(scratch.file("none"), "llama", 2, 7, {{"o_proj", 0}, {"down_proj", 0}});
  const auto analyzed = [&](const std::string& flags) {
    return analyze(scratch, {"four", "two", "none"}, tiny_shard(scratch),
                   "--what similarity --sequences 9 --length 6 " + flags);
  };
  const Outcome got = analyzed("");
  check_outcome(got, Exit::done, "54 tokens of 9 windows of 6 tokens, seed 42\nlinear CKA of");
  check_width(got, scratch);
  const nlohmann::json models = out_json(scratch, "similarity")["models"];
  CHECK(models[0]["cka"].size() == 5);
  CHECK(!models[0].contains("cka_of_first_model"));
  CHECK(models[1]["cka"].size() == 3);
  CHECK(models[1]["cka_of_first_model"].size() == 5);
  CHECK(models[1]["cka_of_first_model"][0].size() == 3);
  for (const nlohmann::json& model : models) {
    CHECK(model["tokens"].size() == 54);
    for (size_t i = 0; i < model["cka"].size(); ++i) {
      CHECK(model["cka"][i][i].get<double>() == doctest::Approx(1).epsilon(1e-12));
      for (size_t j = 0; j < i; ++j) {
        CHECK(model["cka"][i][j] == model["cka"][j][i]);
        CHECK(model["cka"][i][j].get<double>() > 0);
      }
    }
  }
  CHECK(models[0]["cka"][4][0].get<double>() < 0.99);
  CHECK(has(got.output, format_number("%.3f", models[0]["cka"][4][0].get<double>())));
  // Where no layer adds anything all states are the embeddings; and these are as random as the first model's.
  CHECK(models[2]["cka"][2][0].get<double>() == doctest::Approx(1).epsilon(1e-12));
  CHECK(models[2]["cka_of_first_model"][0][2].get<double>() == doctest::Approx(1).epsilon(1e-6));
  const std::string csv = out_text(scratch, "similarity.csv");
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 1 + 25 + 2 * (9 + 15));
  check_has(csv, {str("two,2,", scratch.file("two"), ",1,", json_text(models[1]["cka"][2][1]), "\n"),
                  str("four,4,", scratch.file("two"), ",1,", json_text(models[1]["cka_of_first_model"][4][1]), "\n")});
  const std::string svg = out_text(scratch, "similarity.svg");
  check_has(svg, {"within a model", "with those of another", ">two<", ">hidden state<"});
  // A sample of the tokens is the same for all models, and has other numbers.
  check_outcome(analyzed("--cka-tokens 20"), Exit::done, "20 tokens of 9 windows");
  const nlohmann::json sampled = out_json(scratch, "similarity")["models"];
  CHECK(sampled[0]["tokens"].size() == 20);
  CHECK(sampled[0]["tokens"] == sampled[2]["tokens"]);
  CHECK(sampled[0]["cka"][4][0] != models[0]["cka"][4][0]);
  check_outcome(analyzed("--cka-tokens 1"), Exit::usage, "--cka-tokens");
}

TEST_CASE("similarity: models of other windows are not compared; states that are constant or not finite") {
  const TempDir scratch;
  const Outcome huge = analyze_constants(scratch, "similarity", {{"proj", 3e38}});
  check_outcome(huge, Exit::not_finite, "is not finite; the weights are too large");
  CHECK(!has(huge.output, "wrote"));
  check_outcome(analyze_constants(scratch, "similarity", {{"embed_tokens", 0.1}, {"o_proj", 0}, {"down_proj", 0}}),
                Exit::done, "wrote");
  CHECK(out_json(scratch, "similarity")["models"][0]["cka"][0][0].is_null());
  CHECK(!has(out_text(scratch, "similarity.svg"), "nan"));
  CHECK(!has(out_text(scratch, "similarity.csv"), "nan"));
  // The GPT-2 has learned 11 positions only, so that its windows are shorter.
  save_tiny(scratch.file("short"), "gpt2");
  check_outcome(analyze(scratch, {"model", "short"}, tiny_shard(scratch), "--what similarity --sequences 2"),
                Exit::done, "was measured on other windows");
  CHECK(!out_json(scratch, "similarity")["models"][1].contains("cka_of_first_model"));
  // Padding: what stands behind a task's answers has no rows.
  save_tiny(scratch.file("task"), "llama", 1, 64);
  check_outcome(analyze(scratch, {"task"}, "arith:3", "--what similarity --sequences 6"), Exit::done, "wrote");
  const nlohmann::json model = out_json(scratch, "similarity")["models"][0];
  CHECK(model["shortest_window"] < model["longest_window"]);
  CHECK(std::ssize(model["tokens"]) < 6 * model["longest_window"].get<int64_t>());
  CHECK(std::ssize(model["tokens"]) > 6 * model["shortest_window"].get<int64_t>());
}
