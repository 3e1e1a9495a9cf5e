// analyze --what routing of attention over depth: what it says against what the models compute.
#include "tests/support/routed.h"

using namespace crossply;
using namespace crossply::test;

TEST_CASE("routing: the values times the shares of depth_attention are what attention reads") {
  const std::vector<std::set<size_t>> read{{0}, {1}, {0, 1, 2}, {0, 2, 3}};
  Routed r(tiny_with("depth_attention:depth_start=2:depth_stride=4:depth_recent=1", 1));  // one head, one token
  const RoutingFound found = r.look();
  const RoutingRows& shares = map_of(found, "shares");
  r.run();
  for (size_t l = 0; l < 4; ++l) {
    for (size_t j = 0; j < 4; ++j) CHECK(std::isfinite(shares[l][j]) == read[l].contains(j));
    CHECK((curve_of(found, "entropy")[l] > 0) == (l > 1));
    for (int64_t i = 0; i < r.model.config.head_dim; ++i) {
      double sum = 0;
      for (const size_t j : read[l]) sum += shares[l][j] * r.at(str(j == l ? "own_value." : "value.", j), i);
      CHECK(sum == doctest::Approx(r.at(str("value.", l), i)).epsilon(1e-5));
    }
  }
}

TEST_CASE("routing: the values times the shares of moda are what its queries get") {
  for (const char* choice : {"moda", "moda:depth_start=2:depth_window=2:ffn_kv=false"}) {
    CAPTURE(choice);
    Routed r(tiny_with(choice, 1));  // one token, which reads itself of the sequence
    const RoutingFound found = r.look();
    const RoutingRows& shares = map_of(found, "attention_slots");
    r.run();
    const int64_t D = r.model.config.head_dim, H = r.model.config.num_attention_heads;
    for (size_t l = 0; l < 4; ++l)
      for (int64_t d = 0; d < D; ++d) {
        double got = 0, want = 0;
        for (size_t j = 0; j <= l; ++j) {
          if (std::isfinite(shares[l][j])) want += shares[l][j] * r.at(str("value.", j), d);
          if (r.values->has(str("depth_value.", j)) && std::isfinite(map_of(found, "mlp_slots")[l][j]))
            want += map_of(found, "mlp_slots")[l][j] * r.at(str("depth_value.", j), d);
        }
        for (int64_t h = 0; h < H; ++h) got += r.at(str("attended.", l), h * D + d) / static_cast<double>(H);
        CHECK(got == doctest::Approx(want).epsilon(1e-5).scale(0.1));
      }
    const double whole = shares[3][3] + curve_of(found, "depth")[3];
    CHECK(whole == doctest::Approx(1).epsilon(1e-12));
    CHECK((curve_of(found, "depth")[1] > 0) == (std::string(choice) == "moda"));
  }
}

TEST_CASE("routing: the shares of moda are of what attention sees, within windows, a loop's too, and documents") {
  const auto with_window = [](Config config, int64_t window) {
    config.sliding_window = window, config.window_pattern = "SSSS";
    config.check(Exit::usage, "test");
    return config;
  };
  const Config plain = tiny_with("moda", 2);
  Routed alone(with_window(plain, 1), {5}), documents(plain, {5});
  for (Routed* r : {&alone, &documents}) r->windows[0].tokens.assign(5, 1);
  const std::vector<double> want = curve_of(alone.look(), "depth"), got = curve_of(documents.look({1}), "depth"),
                            all = curve_of(documents.look(), "depth");
  for (size_t l = 1; l < 4; ++l) {
    CHECK(got[l] == doctest::Approx(want[l]).epsilon(1e-6));
    CHECK(std::abs(all[l] - want[l]) > 0.01);
  }
  Config loop = with_window(plain, 2);
  loop.loop.kind = "anchor", loop.loop.passes = 3;
  loop.check(Exit::usage, "test");
  Routed looped(loop, {5});
  const std::vector<double> depth = curve_of(looped.look(), "depth");
  CHECK(std::ssize(depth) == looped.layers());
  for (const double share : depth) CHECK((share >= 0 && share < 1));
}

TEST_CASE("routing: the shares of depth_attention are of its own keys, whatever attention chooses") {
  const auto shares = [](const char* choice, const char* map) {
    Routed r(tiny_with(choice), {5});
    return map_of(r.look(), map)[1];
  };
  const std::vector<double> full = shares("lime+depth_attention", "depth_attention.shares"),
                            last = shares("lime+depth_attention:routing=own", "shares");
  for (size_t j = 0; j < 2; ++j) CHECK(full[j] == doctest::Approx(last[j]).epsilon(1e-9));
}

TEST_CASE("routing: every pair that is allowed can be looked at") {
  const auto& all = architectures();
  int64_t pairs = 0;
  for (size_t i = 2; i < all.size(); ++i)
    for (size_t j = i + 1; j < all.size(); ++j) {
      if (all[i].draft || all[j].draft) continue;
      std::unique_ptr<Routed> routed;
      try {
        routed = std::make_unique<Routed>(tiny_with(all[i].name + "+" + all[j].name), std::vector<int64_t>{5});
      } catch (const Error&) {
        continue;  // tests/models/test_combined.cpp has the list
      }
      CAPTURE(routed->model.config.arch);
      ++pairs;
      if (find_routings(routed->model.config).parts.empty()) continue;
      const RoutingFound found = routed->look();
      CHECK(!(found.bands.empty() && found.curves.empty()));
    }
  CHECK(pairs == 102);
}

TEST_CASE("routing: of a part that computes nothing there is none, and the others can be looked at") {
  for (const std::string choice : {"mhc+depth_attention:depth_start=4", "kv_share+depth_attention:depth_start=4",
                                   "lime+depth_attention:depth_start=4", "mhc+lime:routing=own",
                                   "mhc+moda:depth_start=4", "resformer+lime:routing=own"}) {
    CAPTURE(choice);
    Routed routed(tiny_with(choice), {5});
    const Routings routings = find_routings(routed.model.config);
    REQUIRE(routings.parts.size() == 1);
    CHECK(choice.starts_with(routings.parts[0].kind->arch));
    const RoutingFound found = routed.look();
    CHECK_FALSE((found.bands.empty() && found.curves.empty()));
  }
  CHECK(find_routings(tiny_with("lime:routing=own")).parts.size() == 1);
}
