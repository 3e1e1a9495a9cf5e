#include "eval/inside/separability.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/rng.h"

namespace crossply {

using namespace separability;

namespace {

// softmax(W x + b) of a row in p (classes); returns the likeliest class.
int64_t probabilities_of(const LinearProbe& probe, const float* x, std::vector<double>& p) {
  const int64_t C = probe.C;
  for (int64_t c = 0; c < probe.classes; ++c) {
    const double* w = probe.W.data() + c * C;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < C; ++i) sum += w[i] * static_cast<double>(x[i]);
    p[static_cast<size_t>(c)] = sum + probe.W[static_cast<size_t>(probe.classes * C + c)];
  }
  const auto largest = std::max_element(p.begin(), p.end());
  const double max = *largest;
  double sum = 0;
  for (double& v : p) sum += v = std::exp(v - max);
  for (double& v : p) v /= sum;
  return largest - p.begin();
}

struct AdamMoments {
  std::vector<double> first, second;
  int64_t steps = 0;

  void update(std::vector<double>& weights, const std::vector<double>& gradient) {
    ++steps;
    const double correct1 = 1 - std::pow(beta1, static_cast<double>(steps));
    const double correct2 = 1 - std::pow(beta2, static_cast<double>(steps));
    for (size_t i = 0; i < weights.size(); ++i) {
      first[i] = beta1 * first[i] + (1 - beta1) * gradient[i];
      second[i] = beta2 * second[i] + (1 - beta2) * gradient[i] * gradient[i];
      weights[i] -= rate * (first[i] / correct1) / (std::sqrt(second[i] / correct2) + adam_epsilon);
    }
  }
};

}  // namespace

std::vector<int64_t> shuffled_order(int64_t n, uint64_t seed, uint64_t stream) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  Random random(seed, stream);
  for (int64_t i = n - 1; i > 0; --i)
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(random.below(i + 1))]);
  return order;
}

std::vector<std::vector<int64_t>> test_folds(int64_t n, uint64_t seed) {
  const std::vector<int64_t> order = shuffled_order(n, seed, stream_of("separability.folds"));
  std::vector<std::vector<int64_t>> list;
  auto at = order.begin();
  for (int64_t k = 0; k < folds; ++k) {
    const int64_t size = n / folds + (k < n % folds ? 1 : 0);
    list.emplace_back(at, at + size);
    std::sort(list.back().begin(), list.back().end());
    at += size;
  }
  return list;
}

LinearProbe::LinearProbe(int64_t channels, int64_t outputs, uint64_t seed, uint64_t stream)
    : C(channels), classes(outputs) {
  const double bound = 1 / std::sqrt(static_cast<double>(C));
  for (int64_t i = 0; i < classes * (C + 1); ++i)
    W.push_back(bound * (2 * random_uniform(seed, stream, static_cast<uint64_t>(i)) - 1));
}

int64_t LinearProbe::train_epoch(const float* rows, const std::vector<int>& labels, const std::vector<int64_t>& order) {
  const int64_t n = std::ssize(order);
  AdamMoments moments{std::vector<double>(W.size()), std::vector<double>(W.size())};
  std::vector<double> gradient(W.size()), p(static_cast<size_t>(classes));
  for (int64_t begin = 0; begin < n; begin += batch) {
    const int64_t end = std::min(n, begin + batch);
    std::fill(gradient.begin(), gradient.end(), 0.0);
    for (int64_t k = begin; k < end; ++k) {
      const auto row = static_cast<size_t>(order[static_cast<size_t>(k)]);
      const float* x = rows + static_cast<int64_t>(row) * C;
      probabilities_of(*this, x, p);
      p[static_cast<size_t>(labels[row])] -= 1;
      for (int64_t c = 0; c < classes; ++c) {
        const double error = p[static_cast<size_t>(c)] / static_cast<double>(end - begin);
        double* g = gradient.data() + c * C;
        for (int64_t i = 0; i < C; ++i) g[i] += error * static_cast<double>(x[i]);
        gradient[static_cast<size_t>(classes * C + c)] += error;
      }
    }
    moments.update(W, gradient);
  }
  return moments.steps;
}

double LinearProbe::accuracy(const float* rows, const std::vector<int>& labels,
                             const std::vector<int64_t>& test) const {
  std::vector<double> p(static_cast<size_t>(classes));
  double sum = 0;
  int64_t batches = 0;
  for (size_t begin = 0; begin < test.size(); begin += batch, ++batches) {
    const size_t end = std::min<size_t>(test.size(), begin + batch);
    int64_t right = 0;
    for (size_t k = begin; k < end; ++k)
      right += probabilities_of(*this, rows + test[k] * C, p) == labels[static_cast<size_t>(test[k])];
    sum += static_cast<double>(right) / static_cast<double>(end - begin);
  }
  return sum / static_cast<double>(batches);
}

double Separability::mean() const {
  return std::accumulate(folds.begin(), folds.end(), 0.0) / static_cast<double>(folds.size());
}

double Separability::deviation() const {
  double sum = 0;
  for (const double fold : folds) sum += (fold - mean()) * (fold - mean());
  return std::sqrt(sum / static_cast<double>(folds.size()));
}

int64_t updates_of_probe(int64_t rows) {
  const int64_t trained = rows - (rows + folds - 1) / folds;
  return (trained + batch - 1) / batch;
}

double separability_flops(int64_t rows, int64_t classes, int64_t C) {
  const double forward = 2 * static_cast<double>(rows * classes * C);  // the gradient takes as many
  const double adam = 13 * static_cast<double>(folds * updates_of_probe(rows) * classes * (C + 1));
  return (folds - 1) * 2 * forward + forward + adam;
}

Separability linear_separability(const Vectors& vectors, const std::vector<int>& labels, int64_t classes,
                                 uint64_t seed) {
  const int64_t n = std::ssize(labels);
  const std::vector<std::vector<int64_t>> tests = test_folds(n, seed);
  Separability found;
  for (size_t k = 0; k < tests.size(); ++k) {
    std::vector<char> tested(static_cast<size_t>(n), 0);
    for (const int64_t row : tests[k]) tested[static_cast<size_t>(row)] = 1;
    std::vector<int64_t> order = shuffled_order(n, seed, stream_of(str("separability.order.", k)));
    std::erase_if(order, [&](int64_t row) { return tested[static_cast<size_t>(row)] != 0; });
    LinearProbe probe(vectors.C, classes, seed, stream_of(str("separability.init.", k)));
    probe.train_epoch(vectors.rows.data(), labels, order);
    found.folds.push_back(probe.accuracy(vectors.rows.data(), labels, tests[k]));
  }
  return found;
}

}  // namespace crossply
