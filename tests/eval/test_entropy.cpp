// The matrix-based entropy: known spectra, known rows, and the program.
#include "engine/io/json.h"
#include "eval/inside/entropy.h"

#include "cli/format.h"
#include "tests/support/inside.h"

using namespace crossply;
using namespace crossply::test;

namespace {

using Rows = std::vector<double>;

Rows random_rows(int64_t n, int64_t C, uint64_t seed) {
  Rows x;
  for (int64_t i = 0; i < n * C; ++i) x.push_back(random_normal(seed, 3, static_cast<uint64_t>(i)));
  return x;
}

ChannelMoments moments_of(const Rows& x, int64_t C) {
  ChannelMoments moments;
  moments.add(x.data(), std::ssize(x) / C, C);
  return moments;
}

MatrixEntropy of_all(const Rows& x, int64_t C, double alpha) {
  return matrix_entropy(x.data(), std::ssize(x) / C, C, moments_of(x, C), alpha);
}

}  // namespace

TEST_CASE("entropy: of known spectra") {
  for (const double alpha : {0.5, 0.99, 1.0, 2.0}) {
    CAPTURE(alpha);
    CHECK(entropy_of_spectrum(std::vector<double>(7, 3.5), alpha).renyi == doctest::Approx(std::log(7)).epsilon(1e-12));
    CHECK(entropy_of_spectrum({5, 0, 0, -1e-12}, alpha).renyi == 0);
    CHECK(entropy_of_spectrum({0, 0, 0}, alpha).renyi == 0);
    CHECK(entropy_of_spectrum({}, alpha).renyi == 0);
    // Of 3/4 and 1/4.
    const double expected = alpha == 1 ? 2 * std::log(2) - 0.75 * std::log(3)
                                       : std::log(std::pow(0.75, alpha) + std::pow(0.25, alpha)) / (1 - alpha);
    CHECK(entropy_of_spectrum({1, 3}, alpha).renyi == doctest::Approx(expected).epsilon(1e-13));
    CHECK(entropy_of_spectrum({1, 3}, alpha).shannon ==
          doctest::Approx(2 * std::log(2) - 0.75 * std::log(3)).epsilon(1e-13));
  }
  // What rounding leaves of a matrix of rank one is nothing, though the root of it would be 1e-8 a piece.
  std::vector<double> rounding(200, 1e-15);
  rounding[7] = 30;
  CHECK(entropy_of_spectrum(rounding, 0.5).renyi == 0);
}

TEST_CASE("entropy: moments of rows in blocks are those of all rows, far from zero too") {
  constexpr int64_t n = 60, C = 3;
  Rows x = random_rows(n, C, 1);
  for (double& number : x) number += 1e7;
  ChannelMoments blocks;
  for (int64_t at = 0, size = 1; at < n; at += size++) blocks.add(x.data() + at * C, std::min(size, n - at), C);
  const ChannelMoments whole = moments_of(x, C);
  CHECK(blocks.rows == n);
  for (size_t c = 0; c < C; ++c) {
    CHECK(blocks.mean[c] == doctest::Approx(whole.mean[c]).epsilon(1e-14));
    CHECK(blocks.deviation(c) == doctest::Approx(whole.deviation(c)).epsilon(1e-9));
  }
  ChannelMoments two;
  two.add(Rows{1, 4, 3, 4}.data(), 2, 2);
  CHECK(two.deviation(0) == doctest::Approx(std::sqrt(2.0)).epsilon(1e-15));  // unbiased
  CHECK(two.deviation(1) == 0);
  CHECK(moments_of({1, 4}, 2).deviation(0) == 0);  // of one row
}

TEST_CASE("entropy: rows of known spectra, with fewer channels than tokens and with more") {
  // Rows +e and -e of every direction: z-scored, all directions weigh the same.
  for (const int64_t C : {2, 5}) {
    Rows x(static_cast<size_t>(2 * C * C), 0.0);
    for (int64_t c = 0; c < C; ++c)
      x[static_cast<size_t>(2 * c * C + c)] = 3, x[static_cast<size_t>((2 * c + 1) * C + c)] = -3;
    CHECK(of_all(x, C, 0.5).renyi == doctest::Approx(std::log(C)).epsilon(1e-12));
    // A sequence of the first half of these rows has only the first half of the directions.
    if (C == 2)
      CHECK(matrix_entropy(x.data(), 2, C, moments_of(x, C), 0.5).renyi == doctest::Approx(0.0).epsilon(1e-12));
  }
  // All channels the same: rank one, whatever the order.
  const Rows one = random_rows(40, 1, 2);
  Rows copies;
  for (const double number : one) copies.insert(copies.end(), 9, number);
  CHECK(of_all(copies, 9, 0.5).renyi == 0);
  CHECK(of_all(copies, 9, 1).renyi == 0);
  // The spectrum is that of both Gram matrices: of as many rows as channels, transposing changes nothing but the
  // z-scores, so with unit moments nothing at all.
  constexpr int64_t n = 4, C = 30;
  const Rows wide = random_rows(n, C, 3);
  Rows tall(wide.size());
  for (int64_t t = 0; t < n; ++t)
    for (int64_t c = 0; c < C; ++c) tall[static_cast<size_t>(c * n + t)] = wide[static_cast<size_t>(t * C + c)];
  const ChannelMoments unit_wide{2, Rows(C, 0.0), Rows(C, 1.0)}, unit_tall{2, Rows(n, 0.0), Rows(n, 1.0)};
  const double same = matrix_entropy(wide.data(), n, C, unit_wide, 0.5).renyi;
  CHECK(matrix_entropy(tall.data(), C, n, unit_tall, 0.5).renyi == doctest::Approx(same).epsilon(1e-12));
  CHECK(same < std::log(n));
  CHECK(same > 0.5 * std::log(n));
}

TEST_CASE("entropy: a channel's place and scale do not count, and constant rows have none") {
  constexpr int64_t C = 6;
  const Rows x = random_rows(50, C, 4);
  Rows moved = x;
  for (size_t i = 0; i < x.size(); ++i) moved[i] = 1e3 * x[i] * static_cast<double>(1 + i % C) - 7e3;
  CHECK(of_all(moved, C, 0.5).renyi == doctest::Approx(of_all(x, C, 0.5).renyi).epsilon(1e-5));  // 5: of the 1e-5
  for (const double number : {0.0, 0.1f * 1.0, 1e30}) {
    const MatrixEntropy constant = of_all(Rows(static_cast<size_t>(20 * C), number), C, 0.5);
    CHECK(constant.renyi == 0);
    CHECK(constant.shannon == 0);
  }
}

TEST_CASE("entropy: of several models beside each other, in table, JSON, CSV and picture") {
  const TempDir scratch;
  save_tiny(scratch.file("llama"), "llama");
  save_tiny(scratch.file("svformer"), "resformer:variant=svformer", 3);
  save_tiny(scratch.file("lime"), "lime", 2);
  const auto analyzed = [&](const std::string& flags) {
    return analyze(scratch, {"llama", "svformer", "lime"}, tiny_shard(scratch),
                   "--what entropy --sequences 5 --length 6 " + flags);
  };
  const Outcome got = analyzed("");
  check_outcome(got, Exit::done, "5 windows of 6 tokens, seed 42, alpha 0.5; in nats");
  check_width(got, scratch);
  const nlohmann::json json = out_json(scratch, "entropy");
  CHECK(json["alpha"] == 0.5);
  const nlohmann::json &llama = json["models"][0]["layers"], &svformer = json["models"][1]["layers"],
                       &lime = json["models"][2]["layers"];
  CHECK(llama.size() == 4);
  CHECK(svformer.size() == 3);
  CHECK(lime.size() == 2);
  for (const nlohmann::json& layers : {llama, svformer, lime})
    for (const nlohmann::json& layer : layers) {
      CHECK(layer["hidden"]["channels"] == 8);
      CHECK(layer["hidden"]["bound"].get<double>() == doctest::Approx(std::log(6)));
      CHECK(layer["value"]["bound"].get<double>() == doctest::Approx(std::log(4)));  // two heads of two channels
      for (const auto& [key, value] : layer.items()) {
        if (value.is_null()) continue;
        for (const char* number : {"mean", "shannon_mean"}) {
          CHECK(value[number].get<double>() > 0);
          CHECK(value[number].get<double>() <= value["bound"].get<double>());
        }
        CHECK(value["shannon_mean"] < value["mean"]);  // the entropy falls with its order
        CHECK(value["std"].get<double>() > 0);
        CHECK(has(got.output, format_number("%.3f", value["mean"].get<double>())));
      }
    }
  for (const nlohmann::json& layer : llama) CHECK(layer["own_value"] == layer["value"]);  // nothing is routed
  CHECK(lime[0]["own_value"] == lime[0]["value"]);
  CHECK(lime[1]["own_value"]["mean"] != lime[1]["value"]["mean"]);
  for (size_t l = 1; l < 3; ++l) {  // values of the first layer, none of its own
    CHECK(svformer[l]["own_value"].is_null());
    CHECK(svformer[l]["value"] == svformer[0]["value"]);
  }
  const std::string csv = out_text(scratch, "entropy.csv");
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 1 + 3 * 9 - 2);
  CHECK(has(csv, str("lime,1,own_value,", json_text(lime[1]["own_value"]["mean"]), ",",
                     json_text(lime[1]["own_value"]["std"]))));
  const std::string svg = out_text(scratch, "entropy.svg");
  check_has(svg,
            {"entropy of hidden states, nats", "values as attention reads them", ">bound<", ">svformer<", ">lime<"});
  check_has_none(svg, {"nan", "inf"});
  // Of another order: Shannon's is the same as beside the other.
  check_outcome(analyzed("--alpha 1"), Exit::done, "alpha 1; in nats");
  const nlohmann::json shannon = out_json(scratch, "entropy")["models"][2]["layers"][1]["value"];
  CHECK(shannon["mean"] == lime[1]["value"]["shannon_mean"]);
  CHECK(shannon["mean"] == shannon["shannon_mean"]);
  check_outcome(analyzed("--alpha 0"), Exit::usage, "--alpha");
}

TEST_CASE("entropy: a key/value head that is read several times counts once") {
  const TempDir scratch;
  save_tiny(scratch.file("sla"), "sla");
  check_outcome(analyze(scratch, {"sla"}, tiny_shard(scratch), "--what entropy --sequences 5 --length 9"), Exit::done,
                "wrote");
  int64_t fewer = 0;
  const nlohmann::json json = out_json(scratch, "entropy");
  for (const nlohmann::json& layer : json["models"][0]["layers"]) {
    const int64_t channels = layer["value"]["channels"];
    CHECK(channels % 2 == 0);
    fewer += channels == 4 || channels == 6;  // of four query heads' 8
    CHECK(layer["value"]["bound"].get<double>() == doctest::Approx(std::log(std::min<double>(9, channels))));
  }
  CHECK(fewer == 4);
}

// The windows of a task are shorter than its sequences by different amounts; whatever stands in the rest is not seen.
TEST_CASE("entropy: padding does not count") {
  const TempDir scratch;
  save_tiny(scratch.file("model"), "llama", 1, 64);
  const auto entropy = [&](const std::string& length) {
    check_outcome(analyze(scratch, {"model"}, "arith:3", "--what entropy --sequences 6 --length " + length), Exit::done,
                  "wrote");
    return out_json(scratch, "entropy")["models"][0];
  };
  const nlohmann::json whole = entropy("0");
  CHECK(whole["shortest_window"] < whole["longest_window"]);
  // Cut behind the longest answer of these: the same tokens, without most of the padding.
  const nlohmann::json cut = entropy(json_text(whole["longest_window"]));
  for (const char* value : {"hidden", "value", "own_value"})
    for (const char* number : {"mean", "std", "bound"}) {
      const double expected = whole["layers"][0][value][number].get<double>();
      CHECK(cut["layers"][0][value][number].get<double>() == doctest::Approx(expected).epsilon(1e-6));
    }
}

TEST_CASE("entropy: a model that is not finite gives one line, and one of constant states no entropy") {
  const TempDir scratch;
  const Outcome huge = analyze_constants(scratch, "entropy", {{"proj", 3e38}});
  check_outcome(huge, Exit::not_finite, "is not finite; the weights are too large");
  CHECK(!has(huge.output, "wrote"));
  // All tokens are the same, and no layer adds anything that would depend on the place.
  check_outcome(analyze_constants(scratch, "entropy", {{"embed_tokens", 0.1}, {"o_proj", 0}, {"down_proj", 0}}),
                Exit::done, "wrote");
  for (const nlohmann::json& layer : out_json(scratch, "entropy")["models"][0]["layers"])
    for (const char* value : {"hidden", "value"}) {
      CHECK(layer[value]["mean"] == 0);
      CHECK(layer[value]["std"] == 0);
    }
  CHECK(!has(out_text(scratch, "entropy.svg"), "nan"));
}
