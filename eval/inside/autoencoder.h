// A sparse autoencoder: vectors v of D numbers as sums of at most k of m directions.
//
//   h     = (v - b_d) W_e + b_e          W_e (D, m)
//   z     = the k largest entries of h where they are positive, 0 for the others (kernels/block/top_k.h)
//   v_hat = z W_d + b_d                  W_d (m, D), its rows of length 1
//   loss  = mean of |v - v_hat|^2 over the vectors of a batch
//
// Trained by Adam on a tape. It starts with b_e = 0, b_d the mean of the data, W_d of random directions, W_e = W_d^T.
// Before each update the part of a row's gradient that is parallel to the row is taken out, after it the rows get
// their length back. No loss for features that never are active.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "kernels/optim/optimizer.h"

namespace crossply {

struct AutoencoderSizes {
  int64_t D, m, k;
  int64_t rows;  // vectors of a batch
  // Of one training step: three products of two matrices, each two per multiply-add, forward and twice backward.
  double step_flops() const { return 12.0 * static_cast<double>(m * D) * static_cast<double>(rows); }
};

class Autoencoder {
 public:
  // mean: of the data, (D). The device must live as long.
  Autoencoder(Device& device, const AutoencoderSizes& sizes, const std::vector<double>& mean, uint64_t seed);

  // Forward and backward of (rows, D). Leaves the gradients of the mean loss in the table, and returns that loss.
  double gradients(const float* batch);
  // An update by these at rate lr, with W_d's rows kept at length 1.
  void update(double lr);

  struct Active {
    int32_t feature;
    float value;  // above 0
  };
  struct Codes {
    std::vector<double> losses;               // |v - v_hat|^2 of each vector
    std::vector<std::vector<Active>> active;  // of each vector, by feature
  };
  // Of count <= rows vectors.
  Codes encode(const float* batch, int64_t count);

  // As the formulas have them: "W_e" (D, m), "W_d" (m, D), "b_e" (m), "b_d" (D). gradient: that of the last
  // gradients(), after update() of W_d what the update has used.
  std::vector<float> weight(const std::string& name, bool gradient = false) const;
  double bytes() const;  // of parameters, moments and activations

  const AutoencoderSizes sizes;

 private:
  void record();
  void start(const std::vector<double>& mean, uint64_t seed);
  void load(const float* batch, int64_t count);

  Device& device_;
  mutable ParameterTable params_;  // rows: minus_W_e (m, D), b_e (m), W_d by columns (D, m), b_d (1, D)
  Tape tape_;
  Value *zeros_ = nullptr, *minus_v_ = nullptr, *v_ = nullptr, *z_ = nullptr, *losses_ = nullptr;
  size_t z_node_ = 0;
  std::vector<float>* z_copy_ = nullptr;  // where a forward leaves z; null: nowhere
  std::unique_ptr<Optimizer> optimizer_;
};

struct AutoencoderTraining {
  int64_t tokens = 0;  // seen in all, in whole batches
  double lr = 5e-4;    // falls to 0 by half a cosine
};
// Writes the next batch of vectors, (rows, D).
using VectorSource = std::function<void(float* batch)>;
// Returns the loss of each step. tell(step, steps) after each step. Throws Exit::not_finite.
std::vector<double> train_autoencoder(Autoencoder& model, const VectorSource& next, const AutoencoderTraining& how,
                                      const std::function<void(int64_t, int64_t)>& tell = {});

}  // namespace crossply
