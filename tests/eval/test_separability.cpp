// The linear probe: its folds, its epoch of Adam, and what it says of classes that do and do not lie apart.
#include "eval/inside/separability.h"

#include <doctest/doctest.h>

#include "engine/rng.h"

using namespace crossply;

namespace {

// n rows of C normal numbers for each class, `apart` further along the class' own coordinate.
Vectors normal_classes(int64_t n, int64_t classes, int64_t C, double apart) {
  Vectors vectors{C};
  for (int64_t row = 0; row < n * classes; ++row)
    for (int64_t i = 0; i < C; ++i)
      vectors.rows.push_back(
          static_cast<float>(random_normal(5, 1, static_cast<uint64_t>(row * C + i)) + (row / n == i ? apart : 0)));
  return vectors;
}

std::vector<int> labels_of(int64_t n, int64_t classes) {
  std::vector<int> labels;
  for (int64_t row = 0; row < n * classes; ++row) labels.push_back(static_cast<int>(row / n));
  return labels;
}

}  // namespace

TEST_CASE("separability: five folds of 6,672 rows, each row in one of them, and 84 updates") {
  const auto folds = test_folds(6672, 42);
  std::vector<size_t> sizes;
  std::set<int64_t> rows;
  for (const auto& fold : folds) {
    sizes.push_back(fold.size());
    rows.insert(fold.begin(), fold.end());
    CHECK(std::ranges::is_sorted(fold));
    CHECK(fold.front() < 100);  // mixed: of a fifth of all rows, none is missing from the first 100
    CHECK(fold.back() > 6572);
  }
  CHECK(sizes == std::vector<size_t>{1335, 1335, 1334, 1334, 1334});
  CHECK(rows.size() == 6672);
  CHECK(folds == test_folds(6672, 42));
  CHECK(folds != test_folds(6672, 43));
  LinearProbe probe(3, 4, 42, 0);
  const Vectors vectors = normal_classes(1668, 4, 3, 1);
  std::vector<int64_t> others = shuffled_order(6672, 42, 1);
  std::erase_if(others, [&](int64_t row) { return std::ranges::binary_search(folds[0], row); });
  CHECK(probe.train_epoch(vectors.rows.data(), labels_of(1668, 4), others) == 84);
  CHECK(updates_of_probe(6672) == separability::paper_updates);
}

TEST_CASE("separability: the weights begin uniform within 1 / sqrt(C)") {
  const LinearProbe probe(100, 4, 42, 7);
  REQUIRE(probe.W.size() == 404);
  const auto [low, high] = std::ranges::minmax(probe.W);
  CHECK(low >= -0.1);
  CHECK(low < -0.095);
  CHECK(high <= 0.1);
  CHECK(high > 0.095);
}

// Two classes: softmax is a logistic function of the difference, so that all is written here in another way.
TEST_CASE("separability: an epoch of Adam is what Adam's formulas say") {
  const int64_t n = 70;  // a batch of 64 and one of 6
  Vectors vectors{2};
  std::vector<int> labels;
  for (int64_t row = 0; row < n; ++row) {
    for (uint64_t i = 0; i < 2; ++i)
      vectors.rows.push_back(static_cast<float>(random_normal(9, 2, static_cast<uint64_t>(2 * row) + i)));
    labels.push_back(static_cast<int>(row % 2));
  }
  const std::vector<int64_t> order = shuffled_order(n, 3, 4);
  LinearProbe probe(2, 2, 1, 1);
  double w[2][3], m[2][3] = {}, v[2][3] = {};  // of each class: two weights, and the bias
  for (size_t c = 0; c < 2; ++c) w[c][0] = probe.W[2 * c], w[c][1] = probe.W[2 * c + 1], w[c][2] = probe.W[4 + c];
  CHECK(probe.train_epoch(vectors.rows.data(), labels, order) == 2);
  for (int step = 1; step <= 2; ++step) {
    const size_t begin = step == 1 ? 0 : 64, end = step == 1 ? 64 : 70;
    double g[2][3] = {};
    for (size_t k = begin; k < end; ++k) {
      const auto row = static_cast<size_t>(order[k]);
      const double x[] = {vectors.rows[2 * row], vectors.rows[2 * row + 1], 1};
      double z = 0;  // how far class 1 is ahead
      for (size_t i = 0; i < 3; ++i) z += (w[1][i] - w[0][i]) * x[i];
      const double error = 1 / (1 + std::exp(-z)) - labels[row];
      for (size_t i = 0; i < 3; ++i) g[1][i] += error * x[i] / static_cast<double>(end - begin), g[0][i] = -g[1][i];
    }
    for (size_t c = 0; c < 2; ++c)
      for (size_t i = 0; i < 3; ++i) {
        m[c][i] = 0.9 * m[c][i] + 0.1 * g[c][i], v[c][i] = 0.999 * v[c][i] + 0.001 * g[c][i] * g[c][i];
        const double first = m[c][i] / (1 - std::pow(0.9, step)), second = v[c][i] / (1 - std::pow(0.999, step));
        w[c][i] -= 0.01 * first / (std::sqrt(second) + 1e-8);
      }
  }
  for (size_t c = 0; c < 2; ++c) {
    for (size_t i = 0; i < 2; ++i) CHECK(probe.W[2 * c + i] == doctest::Approx(w[c][i]).epsilon(1e-12));
    CHECK(probe.W[4 + c] == doctest::Approx(w[c][2]).epsilon(1e-12));
  }
}

TEST_CASE("separability: a smaller last batch counts as much as the others") {
  LinearProbe probe(1, 2, 1, 1);
  probe.W = {-1, 1, 0, 0};  // class 1 where x > 0
  Vectors vectors{1, std::vector<float>(66, 1.0F)};
  std::vector<int> labels(66, 1);
  labels[65] = 0;
  std::vector<int64_t> test(66);
  for (size_t i = 0; i < 66; ++i) test[i] = static_cast<int64_t>(i);
  CHECK(probe.accuracy(vectors.rows.data(), labels, test) == 0.75);  // all of 64, one of 2
}

TEST_CASE("separability: near 1 for classes that lie apart, near chance for those that do not") {
  const int64_t n = 800, classes = 4, C = 64;
  const Separability apart = linear_separability(normal_classes(n, classes, C, 12), labels_of(n, classes), classes, 42);
  CHECK(apart.folds.size() == 5);
  CHECK(apart.mean() > 0.99);
  CHECK(apart.deviation() < 0.01);
  // 3,200 tests at chance deviate by 0.8 %.
  const Separability mixed = linear_separability(normal_classes(n, classes, C, 0), labels_of(n, classes), classes, 42);
  CHECK(std::abs(mixed.mean() - 0.25) < 0.04);
  CHECK(linear_separability(normal_classes(n, classes, C, 0), labels_of(n, classes), classes, 42).folds == mixed.folds);
}
