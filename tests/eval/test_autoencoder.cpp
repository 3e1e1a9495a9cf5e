#include "eval/inside/autoencoder.h"
#include "eval/inside/sae_vectors.h"

#include <set>

#include "engine/rng.h"
#include "kernels/devices.h"
#include "tests/support/check.h"

using namespace crossply;
using namespace crossply::test;

namespace {

// The formulas in double, from the weights that the model says it has.
struct ByHand {
  int64_t D, m, k;
  std::vector<double> W_e, W_d, b_e, b_d;
  std::vector<double> dW_e, dW_d, db_e, db_d;

  explicit ByHand(const Autoencoder& model)
      : D(model.sizes.D),
        m(model.sizes.m),
        k(model.sizes.k),
        W_e(convert<double>(model.weight("W_e"))),
        W_d(convert<double>(model.weight("W_d"))),
        b_e(convert<double>(model.weight("b_e"))),
        b_d(convert<double>(model.weight("b_d"))),
        dW_e(W_e.size(), 0.0),
        dW_d(W_d.size(), 0.0),
        db_e(b_e.size(), 0.0),
        db_d(b_d.size(), 0.0) {}

  static double& at(std::vector<double>& x, int64_t i) { return x[static_cast<size_t>(i)]; }

  // Of one vector of a batch of `rows`: its squared error; adds to the gradients of the mean.
  double add(const float* v, int64_t rows, std::vector<double>* code = nullptr) {
    std::vector<double> z(static_cast<size_t>(m)), h(z), v_hat = b_d, e(v_hat), dh(z);
    for (int64_t j = 0; j < m; ++j) {
      at(h, j) = at(b_e, j);
      for (int64_t c = 0; c < D; ++c) at(h, j) += (static_cast<double>(v[c]) - at(b_d, c)) * at(W_e, c * m + j);
    }
    std::set<std::pair<double, int64_t>> order;
    for (int64_t j = 0; j < m; ++j) order.insert({-at(h, j), j});
    auto next = order.begin();
    for (int64_t i = 0; i < k; ++i, ++next) at(z, next->second) = std::max(0.0, -next->first);
    double loss = 0;
    for (int64_t c = 0; c < D; ++c) {
      for (int64_t j = 0; j < m; ++j) at(v_hat, c) += at(z, j) * at(W_d, j * D + c);
      const double error = at(v_hat, c) - static_cast<double>(v[c]);
      loss += error * error;
      at(e, c) = 2 * error / static_cast<double>(rows);
    }
    for (int64_t j = 0; j < m; ++j) {
      for (int64_t c = 0; c < D; ++c) {
        at(dW_d, j * D + c) += at(z, j) * at(e, c);
        if (at(z, j) > 0) at(dh, j) += at(e, c) * at(W_d, j * D + c);
      }
      at(db_e, j) += at(dh, j);
      for (int64_t c = 0; c < D; ++c) {
        at(dW_e, c * m + j) += (static_cast<double>(v[c]) - at(b_d, c)) * at(dh, j);
        at(db_d, c) -= at(dh, j) * at(W_e, c * m + j);
      }
    }
    for (int64_t c = 0; c < D; ++c) at(db_d, c) += at(e, c);
    if (code != nullptr) *code = z;
    return loss;
  }
};

std::vector<double> mean_of(const std::vector<float>& data, int64_t D) {
  std::vector<double> mean(static_cast<size_t>(D), 0.0);
  for (size_t i = 0; i < data.size(); ++i) mean[i % mean.size()] += static_cast<double>(data[i]);
  for (double& x : mean) x /= static_cast<double>(data.size()) / static_cast<double>(D);
  return mean;
}

// Vectors of `active` directions of `directions` each, with weights in [1, 2), around a point that is not 0.
std::vector<float> sparse_data(int64_t n, int64_t D, int64_t directions, int64_t active) {
  std::vector<double> dictionary = random_vector<double>(directions * D, 5);
  for (int64_t j = 0; j < directions; ++j) {
    double square = 0;
    for (int64_t c = 0; c < D; ++c) square += std::pow(dictionary[static_cast<size_t>(j * D + c)], 2);
    for (int64_t c = 0; c < D; ++c) dictionary[static_cast<size_t>(j * D + c)] /= std::sqrt(square);
  }
  Random random(3, 1);
  std::vector<float> data(static_cast<size_t>(n * D), 0.5f);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t a = 0; a < active; ++a) {
      const int64_t j = random.below(directions);
      const double weight = 1 + random.uniform();
      for (int64_t c = 0; c < D; ++c)
        data[static_cast<size_t>(i * D + c)] += static_cast<float>(weight * dictionary[static_cast<size_t>(j * D + c)]);
    }
  return data;
}

void check_unit_rows(const Autoencoder& model) {
  const std::vector<float> W_d = model.weight("W_d");
  for (int64_t j = 0; j < model.sizes.m; ++j) {
    double square = 0;
    for (int64_t c = 0; c < model.sizes.D; ++c)
      square += std::pow(static_cast<double>(W_d[static_cast<size_t>(j * model.sizes.D + c)]), 2);
    CHECK(square == doctest::Approx(1).epsilon(1e-6));
  }
}

}  // namespace

TEST_CASE("autoencoder: it starts as the transposed of unit rows, its losses and gradients are the formulas'") {
  const auto device = make_device("cpu");
  for (const int64_t k : {1, 3, 11}) {
    CAPTURE(k);
    const int64_t D = 7, m = 11, rows = 13;
    const std::vector<float> data = random_vector<float>(rows * D, 1);
    Autoencoder model(*device, {D, m, k, rows}, mean_of(data, D), 1);
    check_unit_rows(model);
    check_close("b_d", model.weight("b_d"), mean_of(data, D), 1e-7);
    const std::vector<float> W_e = model.weight("W_e"), W_d = model.weight("W_d");
    for (int64_t c = 0; c < D; ++c)
      for (int64_t j = 0; j < m; ++j) CHECK(W_e[static_cast<size_t>(c * m + j)] == W_d[static_cast<size_t>(j * D + c)]);
    for (int step = 0; step < 4; ++step) {  // from the second on all weights are anything
      ByHand hand(model);
      double loss = 0;
      for (int64_t n = 0; n < rows; ++n) loss += hand.add(&data[static_cast<size_t>(n * D)], rows);
      CHECK(model.gradients(data.data()) == doctest::Approx(loss / rows).epsilon(1e-5));
      // Sums of 13 tokens or more in float, beside which some of b_d's two terms cancel.
      check_close("dW_e", model.weight("W_e", true), hand.dW_e, 1e-5, 1e-6);
      check_close("dW_d", model.weight("W_d", true), hand.dW_d, 1e-5, 1e-6);
      check_close("db_e", model.weight("b_e", true), hand.db_e, 1e-5, 1e-6);
      check_close("db_d", model.weight("b_d", true), hand.db_d, 1e-5, 1e-6);
      // What the update uses of W_d's is at right angles to its rows.
      model.update(0.05);
      const std::vector<float> g = model.weight("W_d", true);
      for (int64_t j = 0; j < m; ++j) {
        double dot = 0, size = 0;
        for (int64_t c = 0; c < D; ++c) {
          dot += static_cast<double>(g[static_cast<size_t>(j * D + c)]) * hand.W_d[static_cast<size_t>(j * D + c)];
          size += std::abs(static_cast<double>(g[static_cast<size_t>(j * D + c)]));
        }
        CHECK(std::abs(dot) <= 1e-6 * (size + 1e-3));
      }
      check_unit_rows(model);
    }
  }
}

TEST_CASE("autoencoder: the codes of a batch that is not full are those of its vectors, and the emulator's too") {
  const int64_t D = 6, m = 20, k = 4, rows = 5;
  const std::vector<float> data = random_vector<float>(rows * D, 2);
  for (const char* name : {"cpu", "emulator"}) {
    CAPTURE(name);
    std::unique_ptr<Device> device;
    try {
      device = make_device(name);
    } catch (const Error&) {
      continue;  // a build for a GPU has no emulator
    }
    Autoencoder model(*device, {D, m, k, rows}, mean_of(data, D), 1);
    model.gradients(data.data());
    model.update(0.01);
    ByHand hand(model);
    const Autoencoder::Codes codes = model.encode(data.data(), 3);
    REQUIRE(codes.losses.size() == 3);
    REQUIRE(codes.active.size() == 3);
    for (size_t n = 0; n < 3; ++n) {
      std::vector<double> want, got(static_cast<size_t>(m), 0.0);
      CHECK(codes.losses[n] == doctest::Approx(hand.add(&data[n * static_cast<size_t>(D)], rows, &want)).epsilon(1e-5));
      CHECK(codes.active[n].size() <= static_cast<size_t>(k));
      for (const auto& [feature, value] : codes.active[n])
        got[static_cast<size_t>(feature)] = static_cast<double>(value);
      check_close("z", got, want, 1e-5, 1e-6);
    }
  }
}

TEST_CASE("autoencoder: it finds a sparse dictionary, and the same seed gives the same bits") {
  const int64_t D = 16, n = 4000, tokens = 400'000;
  const std::vector<float> data = sparse_data(n, D, 12, 2);
  const std::vector<double> mean = mean_of(data, D);
  const auto device = make_device("cpu");
  std::vector<std::vector<double>> losses;
  for (const int64_t seen : {tokens, int64_t{2000}, int64_t{2000}}) {
    Autoencoder model(*device, {D, 64, 4, 200}, mean, 1);
    VectorBuffer vectors(D, 200, {n}, n, 7, [&](int64_t) { return std::span(data); });
    losses.push_back(train_autoencoder(model, [&](float* batch) { vectors.next(batch); }, {seen, 5e-3}));
    check_unit_rows(model);
    if (seen < tokens) continue;
    double error = 0, variance = 0;
    for (int64_t begin = 0; begin < n; begin += 200)
      for (const double loss : model.encode(&data[static_cast<size_t>(begin * D)], 200).losses) error += loss;
    for (size_t i = 0; i < data.size(); ++i) variance += std::pow(static_cast<double>(data[i]) - mean[i % 16], 2);
    const double fve = 1 - error / variance;
    CAPTURE(fve);
    CHECK(fve > 0.99);
    CHECK(losses[0].back() < 0.05 * losses[0].front());
  }
  CHECK(losses[1].size() == 10);
  CHECK(losses[1] == losses[2]);
}

TEST_CASE("autoencoder: a loss that is not finite ends the training with its step") {
  const auto device = make_device("cpu");
  std::vector<float> data(40, 1e30f);
  for (size_t i = 0; i < data.size(); i += 2) data[i] = -3e30f * static_cast<float>(i);
  Autoencoder model(*device, {4, 8, 2, 5}, std::vector<double>(4, 0.0), 1);
  try {
    train_autoencoder(model, [&](float* batch) { std::copy_n(data.begin(), 20, batch); }, {100, 5e-4});
    FAIL("it trained");
  } catch (const Error& error) {
    CHECK(error.code == Exit::not_finite);
    CHECK(std::string(error.what()).find("at step 1 ") != std::string::npos);
  }
}
