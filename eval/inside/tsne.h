// t-SNE: points in the plane whose neighbourhoods are those of high-dimensional rows, by Barnes and Hut's approximation
// of the gradient. Serial and in double precision: the same numbers on any number of threads.
//
//   p_j|i ~ exp(-beta_i |x_i - x_j|^2) over the 3 * perplexity + 1 nearest rows, beta_i such that 2^H(p_i) = perplexity
//   P_ij = (p_j|i + p_i|j) / 2N,   q_ij = 1 / (1 + |y_i - y_j|^2),   Q_ij = q_ij / Z,   Z = sum of all q_ij
//   KL = sum P log(P / Q),   dKL/dy_i = 4 (sum_j P_ij q_ij (y_i - y_j) - sum_j q_ij^2 (y_i - y_j) / Z)
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace crossply {

struct TsneOptions {
  double perplexity = 30, angle = 0.5, exaggeration = 12;
  int64_t iterations = 1000, exaggerated = 250;  // the latter are among the former
};

struct PlanePoint {
  double x = 0, y = 0;
};

// P of rows, sparse: of row i the columns begin at first[i].
struct Affinities {
  std::vector<int64_t> first;
  std::vector<int32_t> column;
  std::vector<double> p;
};
// p_j|i for squared distances; where all neighbours are equally far, however many they are, the same for all.
std::vector<double> neighbour_probabilities(const std::vector<double>& squared, double perplexity);
// X (N, C), row after row.
Affinities tsne_affinities(const std::vector<double>& X, int64_t C, double perplexity);

// The rows' two first principal components, scaled so that the first one's deviation is 1e-4.
std::vector<PlanePoint> principal_start(const std::vector<double>& X, int64_t C);

// The gradient of KL with P times `exaggeration`; cells that are seen under less than `angle` (width / distance) are
// taken as one point, so that 0 is exact. Z: out, if not null.
std::vector<PlanePoint> tsne_gradient(const Affinities& P, const std::vector<PlanePoint>& Y, double exaggeration,
                                      double angle, double* Z = nullptr);
// By an exact Z.
double tsne_divergence(const Affinities& P, const std::vector<PlanePoint>& Y);

struct TsneResult {
  std::vector<PlanePoint> points;
  double divergence = 0;  // KL, in nats
};
// Of rows X (N, C), which are first scaled to length 1. Descent with momentum 0.5, then 0.8, and a gain for every
// coordinate; the rate is N / exaggeration / 4, at least 50. stepped: called after each
// iteration.
TsneResult tsne(
    const std::vector<float>& rows, int64_t C, const TsneOptions& o, const std::function<void()>& stepped = [] {});
// What it takes, about.
double tsne_flops(int64_t N, int64_t C, const TsneOptions& o);

}  // namespace crossply
