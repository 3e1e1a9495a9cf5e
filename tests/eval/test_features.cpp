#include "eval/inside/features.h"

#include <doctest/doctest.h>

using namespace crossply;

TEST_CASE("features: each rule labels its tokens, and each label has its category") {
  const std::vector<std::pair<std::string, std::vector<std::string>>> want = {
      {"Semantic Root Fragments", {" house", "graph", " run", "it's", "the", " 3d", " don't"}},
      {"Entity Marker Fragments", {" Paris", "Mc", " NASA", "'S"}},
      {"Logic Quantifier Keywords", {" not", "If", " because", "ALL", " more"}},
      {"Morphological Suffixes", {"ing", "ed", "ly", "tion", "s"}},
      {"Functional Leading Space", {" the", " of", " He", " was"}},
      {"Multilingual Unicode", {"é", " Müller", "日本", "я"}},
      {"Byte-Level Fallbacks", {"\xC3", " \xE6\x97", "<0x0A>", "\xFF"}},
      {"Numerical Digit Fragments", {"7", " 1984", "3.14", " $5"}},
      {"Structural Punctuation", {",", " .", "\"", " (", "--", "…", " “", "?!"}},
      {"Code Formatting Symbols", {"\n", "  ", "\t\t", " ", "{", " =", "/*", "[[", " `"}}};
  REQUIRE(want.size() == feature_labels().size());
  for (const auto& [label, texts] : want)
    for (const std::string& text : texts) CHECK_MESSAGE(label_of_token(text, false) == label, "'" << text << "'");
  CHECK(label_of_token("<eos>", false, true) == "Structural Punctuation");
  CHECK(label_of_token("the", true) == "Functional Leading Space");  // of a vocabulary of words
  CHECK(label_of_token("ing", true) == "Semantic Root Fragments");
  for (size_t i = 0; i < want.size(); ++i) {
    CHECK(feature_labels()[i] == want[i].first);
    CHECK(category_of(want[i].first) == feature_categories()[i < 5 ? 0 : i < 8 ? 1 : 2]);
  }
  CHECK_THROWS_AS(category_of("no label"), Error);
  CHECK(majority_label({"a", "b", "b", "c"}) == "b");
  CHECK(majority_label({"a", "b", "b", "a", "c"}) == "a");  // of the most active token
}

TEST_CASE("features: MonoScore by hand") {
  const std::vector<float> a{1, 0}, b{3, 3}, c{0, -2}, zero{0, 0};
  CHECK(mono_score({a.data(), b.data()}, 2) == doctest::Approx(std::sqrt(0.5)));
  // cos(a,b) = 0.7071, cos(a,c) = 0, cos(b,c) = -0.7071
  CHECK(mono_score({a.data(), b.data(), c.data()}, 2) == doctest::Approx(0));
  CHECK(mono_score({a.data(), zero.data()}, 2) == 0);
  CHECK(mono_score({a.data()}, 2) == 1);  // nothing that it could be unlike
  CHECK_THROWS_AS(mono_score({}, 2), Error);
}

TEST_CASE("features: what is rare or dense is dropped, and the best fifth stays") {
  // Embeddings in the plane at 0, 10, 20, ... degrees.
  std::vector<float> embedding;
  for (int i = 0; i < 12; ++i)
    for (const double x : {std::cos(i * 0.1745), std::sin(i * 0.1745)}) embedding.push_back(static_cast<float>(x));
  FeatureCounts counts(8);
  std::vector<std::vector<Autoencoder::Active>> active(1000);
  const auto fire = [&](int32_t feature, size_t at, float value) { active[at].push_back({feature, value}); };
  std::vector<int32_t> tokens(1000);
  for (size_t t = 0; t < 1000; ++t) tokens[t] = static_cast<int32_t>(t % 12);
  for (size_t i = 0; i < 9; ++i) fire(0, i, 1);                                              // rare
  for (size_t i = 0; i < 51; ++i) fire(1, i, 1);                                             // dense
  for (size_t i = 0; i < 12; ++i) fire(2, 12 * i, 1);                                        // token 0 alone
  for (size_t i = 0; i < 10; ++i) fire(3, i % 2 + 12 * i, 1);                                // tokens 0 and 1, or 9 ...
  for (size_t i = 0; i < 10; ++i) fire(4, i * 12 + (i % 2) * 6, static_cast<float>(i + 1));  // 0 and 6
  for (size_t i = 0; i < 50; ++i) fire(5, i, static_cast<float>(100 - i));                   // all
  for (size_t i = 0; i < 12; ++i) fire(6, 12 * i + (i % 2) * 2, 1);                          // 0 and 2
  for (size_t t = 0; t < 1000; ++t) counts.add(tokens[t], active[t]);
  CHECK(counts.tokens() == 1000);
  CHECK(counts.live() == 7);
  FeatureRules rules;
  rules.max_density = 0.05;  // of 1000: 50 activations
  FeatureSelection found = select_features(counts, embedding, 2, rules, Tokenizer());
  CHECK(found.rare == 2);  // the last one never was active
  CHECK(found.dense == 1);
  CHECK(found.single == 1);
  CHECK(found.scored == 5);
  REQUIRE(found.retained.size() == 1);  // a fifth of 5
  CHECK(found.retained[0].index == 2);
  CHECK(found.retained[0].score == 1);
  CHECK(found.retained[0].label.empty());
  rules.kept_share = 1, rules.top_tokens = 3;
  found = select_features(counts, embedding, 2, rules, Tokenizer::bytes());
  REQUIRE(found.retained.size() == 5);
  for (size_t i = 0; i < 5; ++i) CHECK(found.retained[i].index == std::vector<int>{2, 3, 5, 6, 4}[i]);
  CHECK(found.retained[1].score == doctest::Approx(std::cos(0.1745)));
  const Feature& all = found.retained[2];
  CHECK(all.activations == 50);
  CHECK(all.distinct == 12);
  REQUIRE(all.top.size() == 3);  // tokens 0, 1, 2, the first to come with the largest values
  for (size_t i = 0; i < 3; ++i) CHECK(all.top[i].token == static_cast<int32_t>(i));
  CHECK(all.top[0].value == 100);
  const Feature& pair = found.retained[4];
  CHECK(pair.top[0].token == 6);  // 10, before 9
  CHECK(pair.top[1].value == 9);
}

TEST_CASE("features: of one token each, the more active come first, and a comma's is Structural") {
  FeatureCounts counts(3);
  for (int i = 0; i < 60; ++i) counts.add(i % 3 == 0 ? 'q' : ',', {{i % 3 == 0 ? 0 : 1 + i % 2, 1.f}});
  for (int i = 0; i < 5; ++i) counts.add(',', {{2, 1.f}});
  FeatureRules rules;
  rules.max_density = 1, rules.kept_share = 0.6;
  const FeatureSelection found =
      select_features(counts, std::vector<float>(256 * 2, 1.f), 2, rules, Tokenizer::bytes());
  CHECK(found.single == 3);
  REQUIRE(found.retained.size() == 2);
  CHECK(found.retained[0].index == 2);  // 25 activations
  CHECK(found.retained[1].index == 0);  // 20, as feature 1, whose index is larger
  CHECK(found.retained[0].label == "Structural Punctuation");
}

TEST_CASE("features: a tokenizer's texts decide the labels") {
  FeatureCounts counts(2);
  for (int i = 0; i < 20; ++i) {
    counts.add('0' + i % 10, {{0, 1.f}});
    counts.add(i % 3 == 0 ? ',' : '.', {{1, 1.f}});
  }
  std::vector<float> embedding(256 * 2, 1.f);
  FeatureRules rules;
  rules.max_density = 1, rules.kept_share = 1;
  const FeatureSelection found = select_features(counts, embedding, 2, rules, Tokenizer::bytes());
  REQUIRE(found.retained.size() == 2);
  CHECK(found.retained[0].label == "Numerical Digit Fragments");
  CHECK(found.retained[1].label == "Structural Punctuation");
}

TEST_CASE("features: category gating by hand") {
  CategoryGates gates(2, 3);
  gates.add({0.5, 1.0}, {1, 0, 0});
  gates.add({0.1, 0.2}, {3, 2, 0});
  CHECK(gates.at(0, 0) == doctest::Approx((0.5 + 0.3) / 4));
  CHECK(gates.at(1, 0) == doctest::Approx((1.0 + 0.6) / 4));
  CHECK(gates.at(0, 1) == doctest::Approx(0.1));
  CHECK(gates.weight(0) == 4);
  CHECK(std::isnan(gates.at(1, 2)));  // nothing of that category was active
}
