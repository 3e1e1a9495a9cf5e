#include "eval/inside/autoencoder.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/rng.h"
#include "kernels/block/ops.h"

namespace crossply {
namespace {

constexpr AdamwOptions adam_of_autoencoder{0.9, 0.999, 1e-8, 0, 0};

std::vector<float> numbers_on_host(const Tensor& tensor, Device& device) {
  std::vector<float> host(static_cast<size_t>(tensor.numel()));
  device.copy_out(host.data(), tensor.data, tensor.bytes());
  return host;
}

// (columns, rows) of (rows, columns), times factor.
std::vector<float> transposed_matrix(const std::vector<float>& x, int64_t rows, int64_t columns, float factor = 1) {
  std::vector<float> y(x.size());
#pragma omp parallel for schedule(static)
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r)
      y[static_cast<size_t>(c * rows + r)] = factor * x[static_cast<size_t>(r * columns + c)];
  return y;
}

// Calls body(begin, end) for blocks of the m columns, on all threads.
template <class F>
void for_dictionary_columns(int64_t m, F&& body) {
  constexpr int64_t block = 128;
#pragma omp parallel for schedule(static)
  for (int64_t begin = 0; begin < m; begin += block) body(begin, std::min(m, begin + block));
}

// dots[j] = sum_d a[d,j] b[d,j] for the columns [begin, end) of (D, m).
void column_dots(double* dots, const float* a, const float* b, int64_t D, int64_t m, int64_t begin, int64_t end) {
  std::fill(dots, dots + (end - begin), 0.0);
  for (int64_t d = 0; d < D; ++d)
#pragma omp simd
    for (int64_t j = begin; j < end; ++j)
      dots[j - begin] += static_cast<double>(a[d * m + j]) * static_cast<double>(b[d * m + j]);
}

void normalise_columns(float* w, int64_t D, int64_t m) {
  for_dictionary_columns(m, [=](int64_t begin, int64_t end) {
    double squares[128];
    column_dots(squares, w, w, D, m, begin, end);
    for (int64_t j = begin; j < end; ++j)
      squares[j - begin] = squares[j - begin] > 0 ? 1 / std::sqrt(squares[j - begin]) : 0;
    for (int64_t d = 0; d < D; ++d)
#pragma omp simd
      for (int64_t j = begin; j < end; ++j)
        w[d * m + j] = static_cast<float>(static_cast<double>(w[d * m + j]) * squares[j - begin]);
  });
}

// Of columns of length 1.
void remove_parallel_part(float* g, const float* w, int64_t D, int64_t m) {
  for_dictionary_columns(m, [=](int64_t begin, int64_t end) {
    double dots[128];
    column_dots(dots, g, w, D, m, begin, end);
    for (int64_t d = 0; d < D; ++d)
#pragma omp simd
      for (int64_t j = begin; j < end; ++j) g[d * m + j] -= static_cast<float>(dots[j - begin]) * w[d * m + j];
  });
}

}  // namespace

Autoencoder::Autoencoder(Device& device, const AutoencoderSizes& given, const std::vector<double>& mean, uint64_t seed)
    : sizes(given), device_(device), tape_(Dtype::f32) {
  const auto [D, m, k, rows] = sizes;
  CHECK_THAT(D >= 1 && k >= 1 && k <= m && rows >= 1 && std::ssize(mean) == D, "an autoencoder of ", D, " numbers, ", k,
             " of ", m, " features, batches of ", rows);
  params_.add("minus_W_e", Shape{m, D}, Init::constant(0), Role::table, {.wd_mul = 0});
  params_.add("b_e", Shape{m}, Init::constant(0), Role::bias);
  params_.add("W_d", Shape{D, m}, Init::constant(0), Role::table, {.wd_mul = 0});
  params_.add("b_d", Shape{1, D}, Init::constant(0), Role::bias);
  record();
  params_.allocate(device, Dtype::f32, true);
  tape_.differentiate(), tape_.plan(PlanMode::reuse), tape_.allocate(device);
  device.fill(zeros_->tensor.data, 0, zeros_->tensor.bytes());
  tape_.watch([this](size_t n, bool backward) {
    if (n == z_node_ && !backward && z_copy_ != nullptr) *z_copy_ = numbers_on_host(z_->tensor, device_);
  });
  start(mean, seed);
  optimizer_ = std::make_unique<Optimizer>(params_, Buckets(params_), adam_of_autoencoder);
}

void Autoencoder::record() {
  const auto [D, m, k, rows] = sizes;
  // b_d is in both products with its own sign: it is added to -v, and W_e turned round.
  const auto parameter = [&](const char* name) { return tape_.parameter(params_.at(name)); };
  zeros_ = tape_.input("zeros", Shape{1, rows}, Dtype::i32);
  minus_v_ = tape_.input("minus_v", Shape{1, rows, D}, Dtype::f32);
  v_ = tape_.input("v", Shape{1, rows, D}, Dtype::f32);
  Value* b_d = ops::embedding(tape_, "b_d", zeros_, parameter("b_d"));
  Value* centred = ops::add(tape_, "centred", minus_v_, b_d);
  Value* h = ops::linear(tape_, "h", centred, parameter("minus_W_e"), Shape{1, rows, m}, parameter("b_e"));
  z_ = ops::top_k(tape_, "z", h, k);
  z_node_ = tape_.nodes().size() - 1;
  Value* sum = ops::linear(tape_, "sum", z_, parameter("W_d"), Shape{1, rows, D});
  losses_ = ops::squared_error(tape_, "loss", ops::add(tape_, "v_hat", sum, b_d), v_, Shape{1, rows});
}

void Autoencoder::start(const std::vector<double>& mean, uint64_t seed) {
  const auto [D, m, k, rows] = sizes;
  std::vector<float> decoder(static_cast<size_t>(D * m));
  const uint64_t stream = stream_of("sparse autoencoder");
  for (size_t i = 0; i < decoder.size(); ++i) decoder[i] = static_cast<float>(random_normal(seed, stream, i));
  normalise_columns(decoder.data(), D, m);
  const std::vector<float> encoder = transposed_matrix(decoder, D, m, -1), b(mean.begin(), mean.end());
  const auto write = [&](const char* name, const std::vector<float>& numbers) {
    const Tensor& to = params_.at(name).value;
    device_.copy_in(to.data, numbers.data(), to.bytes());
  };
  write("minus_W_e", encoder), write("W_d", decoder), write("b_d", b);
}

void Autoencoder::load(const float* batch, int64_t count) {
  const size_t size = static_cast<size_t>(sizes.rows * sizes.D), given = static_cast<size_t>(count * sizes.D);
  std::vector<float> v(size, 0.f), minus_v(size, 0.f);
  std::copy_n(batch, given, v.begin());
  std::transform(v.begin(), v.end(), minus_v.begin(), std::negate<>());
  device_.copy_in(v_->tensor.data, v.data(), v_->tensor.bytes());
  device_.copy_in(minus_v_->tensor.data, minus_v.data(), minus_v_->tensor.bytes());
}

double Autoencoder::gradients(const float* batch) {
  load(batch, sizes.rows);
  params_.zero_gradients();
  tape_.run(Step{true, 1 / static_cast<double>(sizes.rows)});
  double sum = 0;
  for (const float loss : numbers_on_host(losses_->tensor, device_)) sum += static_cast<double>(loss);
  return sum / static_cast<double>(sizes.rows);
}

void Autoencoder::update(double lr) {
  const Parameter& row = params_.at("W_d");
  std::vector<float> w = numbers_on_host(row.value, device_), g = numbers_on_host(row.grad, device_);
  remove_parallel_part(g.data(), w.data(), sizes.D, sizes.m);
  device_.copy_in(row.grad.data, g.data(), row.grad.bytes());
  optimizer_->begin_step(lr);
  optimizer_->update();
  w = numbers_on_host(row.value, device_);
  normalise_columns(w.data(), sizes.D, sizes.m);
  device_.copy_in(row.value.data, w.data(), row.value.bytes());
}

Autoencoder::Codes Autoencoder::encode(const float* batch, int64_t count) {
  CHECK_THAT(count >= 0 && count <= sizes.rows, count, " vectors in batches of ", sizes.rows);
  load(batch, count);
  std::vector<float> z;
  z_copy_ = &z;
  tape_.run(Step{});
  z_copy_ = nullptr;
  const std::vector<float> losses = numbers_on_host(losses_->tensor, device_);
  Codes codes{{losses.begin(), losses.begin() + count}, {}};
  codes.active.resize(static_cast<size_t>(count));
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < count; ++n)
    for (int64_t j = 0; j < sizes.m; ++j)
      if (const float value = z[static_cast<size_t>(n * sizes.m + j)]; value > 0)
        codes.active[static_cast<size_t>(n)].push_back({static_cast<int32_t>(j), value});
  return codes;
}

std::vector<float> Autoencoder::weight(const std::string& name, bool gradient) const {
  const Parameter& row = params_.at(name == "W_e" ? "minus_W_e" : name);
  std::vector<float> numbers = numbers_on_host(gradient ? row.grad : row.value, device_);
  if (name == "W_e") return transposed_matrix(numbers, sizes.m, sizes.D, -1);
  return name == "W_d" ? transposed_matrix(numbers, sizes.D, sizes.m) : numbers;
}

double Autoencoder::bytes() const {
  return 4.0 * 4 * static_cast<double>(params_.flat_size()) + static_cast<double>(tape_.arena_bytes());
}

// -----------------------------------------------------------------------------------------------------------------

std::vector<double> train_autoencoder(Autoencoder& model, const VectorSource& next, const AutoencoderTraining& how,
                                      const std::function<void(int64_t, int64_t)>& tell) {
  const int64_t rows = model.sizes.rows, steps = std::max<int64_t>(1, how.tokens / rows);
  std::vector<float> batch(static_cast<size_t>(rows * model.sizes.D));
  std::vector<double> losses;
  for (int64_t step = 0; step < steps; ++step) {
    next(batch.data());
    losses.push_back(model.gradients(batch.data()));
    if (!std::isfinite(losses.back()))
      fail(Exit::not_finite, "the autoencoder's loss at step ", step + 1, " is not finite");
    const double done = static_cast<double>(step) / static_cast<double>(steps);
    model.update(how.lr * 0.5 * (1 + std::cos(std::numbers::pi * done)));
    if (tell) tell(step + 1, steps);
  }
  return losses;
}

}  // namespace crossply
